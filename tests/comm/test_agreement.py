"""What all ranks of a group agree on, while another group agrees on something else."""

import pytest
import torch.distributed as dist

from xtrain.comm.agreement import check_same, raise_everywhere, raising_everywhere
from xtrain.testing import expect_error

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


def build_with_a_problem(ranks_that_have_it):
    rank = dist.get_rank()
    problem = "stage=7 is not 1 or 2" if rank in ranks_that_have_it else None
    check_same("models", [], None, {"stage": rank}, problem)  # the problem comes first


@pytest.mark.verifies("xtrain.comm.agreement:check_same")
def test_what_some_ranks_complain_about_is_said_once_with_their_numbers(world):
    for ranks, who in (([1, 3], "ranks 1, 3: "), ([2], "rank 2: "), (range(4), "")):
        errors = expect_error(world(4), build_with_a_problem, ranks)
        assert {str(error) for error in errors} == {f"{who}stage=7 is not 1 or 2"}
