"""The network between two nodes is cut, or slow: half of the ranks in each of two
namespaces.

    rank 0, 10.77.0.1  ---- cable ----  rank 1, 10.77.0.2

A cable that is down says nothing: all ranks find out when a call has taken `timeout`.
"""

import sys

import pytest

from tests.backends.test_two_hosts import hosts
from tests.faults.cases import CASES, CUT, SLOW_NETWORK
from tests.faults.test_processes import (
    SLACK,
    STEP,
    disturbed,
    goes_on,
    names_its_place,
    timeout_of,
    undisturbed,
)
from tests.faults.trained import select
from tests.train.test_run import close

pytestmark = [
    pytest.mark.processes("faults are of processes"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="network namespaces are Linux's"
    ),
]
__all__ = ["undisturbed"]
nodes = hosts  # a fixture


@pytest.mark.verifies("xtrain.train.phases:Place")
@pytest.mark.parametrize("case", select(c for c in CASES if c.fault == CUT))
def test_nodes_that_are_cut_apart_end_in_time_and_name_rank_step_and_call(
    case, nodes, tmp_path, undisturbed
):
    ends, victim = disturbed(case, tmp_path, nodes)
    step, saved = (0, 0) if case.phase == "start" else (STEP, STEP - 1)
    for rank, end in enumerate(ends):
        assert end.code == 1, (rank, end)
        assert names_its_place(end, rank, step, victim), (rank, end)
        assert end.after < timeout_of(case) + SLACK, (rank, end)
    goes_on(case, tmp_path, saved, undisturbed(case.axis))


@pytest.mark.verifies("xtrain.train.run:TrainingRun")
@pytest.mark.parametrize("case", select(c for c in CASES if c.fault == SLOW_NETWORK))
def test_a_run_goes_on_over_a_network_that_has_become_slow(
    case, nodes, tmp_path, undisturbed
):
    for end in disturbed(case, tmp_path, nodes)[0]:
        assert end.code == 0, end
        assert close(end.losses, undisturbed(case.axis))
        assert end.after > 2.0
