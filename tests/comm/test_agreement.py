"""What all ranks of a group agree on, while another group agrees on something else."""

import pytest
import torch.distributed as dist

from xtrain.comm.agreement import (
    check_same,
    raise_everywhere,
    raising_everywhere,
    with_ranks,
)
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
    assert second.endswith("rank 1: too large")
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


def build_with_long_options():
    rank = dist.get_rank()
    check_same("models", [], None, {"layers": [*range(200), rank], "name": "a"})


@pytest.mark.verifies("xtrain.comm.agreement:check_same")
def test_long_options_that_differ_are_told_in_200_characters(world):
    for error in expect_error(world(2), build_with_long_options):
        text = str(error)
        assert text.startswith("ranks 0 and 1 have different layers: layers is [0, 1,")
        assert text.endswith(" 198, 199, 1]") and len(text) <= 200


RULE = "hidden_size=4096 is no multiple of 3"


@pytest.mark.verifies("xtrain.comm.agreement:with_ranks")
def test_no_number_of_ranks_makes_a_message_longer_than_200_characters():
    cases = {
        "ranks 0-9998: " + RULE: [RULE] * 9_999 + [None],
        "rank 5: " + RULE: [None] * 5 + [RULE] + [None] * 994,
        "ranks 0-3, 6, 7: a; ranks 4, 5: b": list("aaaabbaa"),
        "ranks 0, 2, 4, 6, 8, 10 and 494 more: a": ["a", None] * 500,
        "ranks 0, 2, 4, 6, 8, 10 and 3 more: a": ["a", None] * 6 + ["a"] * 3,
        "a": ["a"] * 64,
        "a" * 200: ["a" * 200] * 2,
    }
    for text, problems in cases.items():
        assert with_ranks(problems) == text
    many = with_ranks([f"stage {n}: {RULE}" for n in range(512)])
    assert many.startswith(f"rank 0: stage 0: {RULE}; rank 1: stage 1: {RULE}; ")
    assert many.endswith(" 509 more")
    long = [f"{n} {'of many words, ' * 30}{RULE}" for n in range(16)]
    for texts in (long[:1], [*long[:1], None], long):
        assert RULE in with_ranks(texts)
        assert len(with_ranks(texts)) <= 200
        lines = with_ranks([f"tensors:\n{t}" for t in texts]).split("\n")
        assert lines[0].endswith("tensors:") and max(map(len, lines)) <= 200
        assert RULE in lines[1]
    path = f"/{'folder/' * 40}index.json: {RULE}"
    assert with_ranks([path, None]) == f"rank 0: {path}"
    assert (
        len(with_ranks([f"{n}" * 150 for n in range(9)], [10**6 * n for n in range(9)]))
        <= 200
    )


@pytest.mark.verifies("xtrain.comm.agreement:with_ranks")
def test_ranks_are_named_once_and_as_all_groups_know_them():
    inner = with_ranks([None, "too large"], [5, 7])
    assert inner == "rank 7: too large"
    assert with_ranks([None, inner], [3, 7]) == inner
    both = with_ranks([inner, "rank 3: too small"], [7, 3])
    assert both == "rank 7: too large; rank 3: too small"
    assert with_ranks(["rank 1 has stages [0]", None]) == (
        "rank 0: rank 1 has stages [0]"
    )


def complain_twice() -> str:
    """Rank 3 has a problem that its pair tells, and then all of them."""
    groups = [dist.new_group(half) for half in HALVES]
    rank = dist.get_rank()
    try:
        with (
            raising_everywhere(ValueError, group=None),
            raising_everywhere(ValueError, group=groups[rank % 2]),
        ):
            if rank == 3:
                raise Mute
    except ValueError as error:
        return str(error)
    return "fine"


class Mute(Exception):
    def __str__(self) -> str:
        raise KeyError("no words")


@pytest.mark.verifies("xtrain.comm.agreement:raising_everywhere")
def test_a_problem_told_twice_names_its_rank_once(world):
    said = "rank 3: Mute: an error whose text raises KeyError"
    assert world(4).run(complain_twice) == [said] * 4
