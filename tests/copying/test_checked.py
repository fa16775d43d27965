"""What is exported is the algorithm that is copied, with checks around it."""

import inspect
import subprocess
import sys

import pytest

from xtrain import data_parallel, zero
from xtrain.data_parallel import ddp, naive
from xtrain.zero import fsdp, optimizer

PAIRS = [
    (data_parallel.NaiveDataParallel, naive.NaiveDataParallel),
    (data_parallel.DistributedDataParallel, ddp.DistributedDataParallel),
    (zero.ZeroOptimizer, optimizer.ZeroOptimizer),
    (zero.FullyShardedDataParallel, fsdp.FullyShardedDataParallel),
]


@pytest.mark.parametrize(("exported", "bare"), PAIRS, ids=lambda kind: kind.__module__)
def test_both_take_the_same_arguments_but_for_whose_collectives(exported, bare):
    assert issubclass(exported, bare)
    reduction = [inspect.signature(k).parameters for k in (exported, bare)]
    defaults = [each["gradient_reduction"].default for each in reduction]
    assert defaults == [None, "average"]  # the exported one asks the model's mesh
    theirs, ours = (
        {
            name: (parameter.kind, parameter.default)
            for name, parameter in inspect.signature(kind).parameters.items()
            if name not in ("collectives", "all_reduce", "gradient_reduction")
        }
        for kind in (exported, bare)
    )
    assert theirs == ours
    assert list(theirs) == list(ours)


def test_whoever_imports_an_algorithm_has_its_calls_checked():
    code = (
        "import xtrain.comm.ring\n"
        "from xtrain.comm.checks import CHECKS\n"
        "from xtrain.comm.rounds import COUNTERS, Round\n"
        "print(sorted(CHECKS), COUNTERS == [Round])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (
        done.stdout == "['collective', 'messages', 'peer', 'tensor', 'values'] True\n"
    )
