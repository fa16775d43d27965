"""How the ranks of a step agree on sums and failures at its end."""

import pytest
import torch.distributed as dist

from xtrain.pipeline_parallel.agreement import NotReduced, sums_of_all


def ends(failures):
    """The sums of a step in which these ranks fail so, or what is raised."""
    rank = dist.get_rank()
    try:
        total, count = sums_of_all(rank + 1.0, 2, failures.get(rank), None, None)
    except (ValueError, RuntimeError) as error:
        return type(error).__name__, str(error)
    return total.item(), count.item()


@pytest.mark.parametrize(
    ("failures", "said"),
    [
        ({}, (3.0, 4.0)),
        ({1: NotReduced("sums differ")}, "sums differ"),
        ({0: NotReduced("sums differ"), 1: NotReduced("sums differ")}, "sums differ"),
        ({0: NotReduced("sums differ"), 1: ValueError("bad label")}, "bad label"),
    ],
)
def test_a_reduction_that_failed_is_told_unless_something_failed_before(
    world, failures, said
):
    for ended in world(2).run(ends, failures):
        if failures:
            assert said in ended[1] and ("sums differ" in ended[1]) is (
                said == "sums differ"
            )
        else:
            assert ended == said
