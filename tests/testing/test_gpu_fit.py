"""How many ranks and test processes GPUs take, on machines that do not exist here."""

import json
import subprocess
import sys

import pytest

from xtrain.testing import gpu_fit
from xtrain.testing.backend_choice import Choice, Machine, rank_environment
from xtrain.testing.gpu_fit import Fit, fit, how_to_share
from xtrain.testing.verify_gpu import command, times_longer
from xtrain.testing.world import GPU_SECONDS, SECONDS, patience

GIB = 2**30
OLD, NEW = (2, 29, 7), (2, 30, 7)
NCCL = Choice("nccl", "cuda", "as asked")


@pytest.mark.parametrize(
    ("machine", "free", "expected"),
    [
        (Machine(1, NEW), [78], Fit(1, 78)),
        (Machine(2, NEW), [78] * 2, Fit(1, 78)),
        (Machine(4, NEW), [78] * 4, Fit(4, 19)),  # two share, in worlds of 8
        (Machine(8, NEW), [78] * 8, Fit(4, 19)),  # none shares
        (Machine(1, OLD), [78], Fit(4, 19)),
        (Machine(2, OLD), [78, 14], Fit(2, 7)),  # the fuller GPU decides
        (Machine(1, OLD), [5], Fit(1, 5)),
        (Machine(1, None), [7], Fit(1, 7)),
    ],
)
def test_ranks_that_share_a_gpu_have_one_test_process(machine, free, expected):
    found = fit(machine, [gib * GIB for gib in free])
    assert found == expected
    words = command(NCCL, found, ["-x"])
    assert words[words.index("-n") + 1] == str(expected.workers)
    assert words[words.index("--ranks-per-gpu") + 1] == str(expected.ranks_per_gpu)


def test_a_gpu_without_room_for_a_rank_is_named():
    with pytest.raises(ValueError, match=r"GPU 1 has 0.5 GiB of free memory"):
        fit(Machine(2, NEW), [9 * GIB, GIB // 2])


@pytest.mark.parametrize(
    ("size", "fits", "on_one"), [(8, 7, None), (8, 4, 4), (8, 3, 4), (3, 1, 2)]
)
def test_a_world_that_the_memory_does_not_take_is_refused_with_the_numbers(
    size, fits, on_one
):
    gpus = 1 if on_one is None else 2
    machine = Machine(gpus, NEW, fits=fits)
    if on_one == fits:
        assert rank_environment(size, NCCL, machine)["NCCL_NVLS_ENABLE"] == "0"
        return
    why = f"{size} ranks put {on_one or size} on a GPU, .* is enough for {fits}"
    with pytest.raises(ValueError, match=why):
        rank_environment(size, NCCL, machine)
    assert times_longer(size, NCCL, machine) == 0.0


def test_a_skipped_world_takes_no_time_and_a_shared_gpu_takes_turns():
    assert times_longer(2, NCCL, Machine(1, OLD)) == 0.0
    assert times_longer(8, NCCL, Machine(2, NEW)) == 4.0
    assert times_longer(8, NCCL, Machine(8, OLD)) == 1.0
    assert times_longer(8, Choice("gloo", "cpu", ""), Machine()) == 1.0


def test_one_line_says_what_nccl_2_30_gives_and_how_to_get_it():
    line = how_to_share(Machine(1, OLD), "13.0")
    assert "\n" not in line
    assert "NCCL 2.29.7 wants a GPU for each rank: only worlds of up to 1 run" in line
    assert "pip install --no-deps --target build/nccl nvidia-nccl-cu13==2.30.7;" in line
    assert "LD_PRELOAD=$PWD/build/nccl/nvidia/nccl/lib/libnccl.so.2 make" in line
    assert "nvidia-nccl-cu12==" in how_to_share(Machine(2, OLD), "12.9")
    assert "NCCL of unknown version" in how_to_share(Machine(2, None), "13.0")


@pytest.mark.parametrize(
    ("machine", "cuda"),
    [(Machine(1, NEW), "13.0"), (Machine(8, OLD), "13.0"), (Machine(), "13.0"),
     (Machine(1, OLD), None)],
)  # fmt: skip
def test_where_nothing_is_missing_nothing_is_said(machine, cuda):
    assert how_to_share(machine, cuda) == ""


def test_the_memory_is_asked_in_a_process_that_ends(monkeypatch):
    answers = [(0, json.dumps([5 * GIB, GIB]), ""), (1, "", "Trace\nRuntimeError: no")]

    def run(command, **how):
        assert command[0] == sys.executable
        compile(command[-1], "asked", "exec")
        return subprocess.CompletedProcess(command, *answers.pop(0))

    monkeypatch.setattr(gpu_fit.subprocess, "run", run)
    assert gpu_fit.free_memory() == [5 * GIB, GIB]
    with pytest.raises(ValueError, match="RuntimeError: no"):
        gpu_fit.free_memory()


def test_ranks_that_share_a_gpu_or_a_core_have_more_time():
    assert patience(2, 4, None) == SECONDS
    assert patience(8, 2, None) == 4 * SECONDS
    assert patience(2, 16, 2) == GPU_SECONDS
    assert patience(8, 16, 1) == 8 * GPU_SECONDS
    assert patience(8, 2, 4) == 4 * GPU_SECONDS
