"""What all ranks of a group agree on, while another group agrees on something else."""

import pytest
import torch.distributed as dist

from xtrain.comm.agreement import raise_everywhere, raising_everywhere

HALVES = [0, 2], [1, 3]


def complain(how: str) -> str:
    """Rank 1 has a problem; ranks 0 and 2 are in a group where nobody has."""
    groups = [dist.new_group(half) for half in HALVES]
    rank = dist.get_rank()
    group, problem = groups[rank % 2], "too large" if rank == 1 else None
    try:
        if how == "told":
            raise_everywhere(ValueError, problem, group)
        else:
            with raising_everywhere(KeyError, ValueError, group=group, what="load: "):
                if problem:
                    raise ValueError(problem)
    except ValueError as error:
        return str(error)
    return "fine"


@pytest.mark.verifies(
    "xtrain.comm.agreement:raise_everywhere", "xtrain.comm.agreement:raising_everywhere"
)
@pytest.mark.parametrize("how", ["told", "raised"])
def test_a_problem_is_an_error_on_every_rank_of_its_own_group(world, how):
    first, second, third, fourth = world(4).run(complain, how)
    assert first == third == "fine"
    assert second == fourth
    assert second.endswith("rank 0: too large")
    assert second.startswith("load: ") == (how == "raised")
