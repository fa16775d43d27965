"""Every case of the support matrix comes out as xtrain_docs.matrix.cases declares."""

from functools import cache

import pytest

from xtrain.cluster.per_rank import replaced
from xtrain.data_parallel import NaiveDataParallel
from xtrain_docs.matrix.cases import (
    REFUSED,
    WRONG,
    cases,
    is_pair,
    is_tried,
    verdict,
)
from xtrain_docs.matrix.features import FEATURES, WRAPPERS, prepare
from xtrain_docs.matrix.training import error_of, reference, stream_of, train

PRECISIONS = [name for name, f in FEATURES.items() if f.axis == "precision"]


@cache
def expected(features, stream):
    """One process's weights; a wrapper has no say in them."""
    return reference(("", *features), stream)


def largest_error(case, found):
    """Of all ranks, against one process that trains on the same batches."""
    setup = prepare(case)
    return max(
        error_of(weights, *expected(case[1:], stream_of(setup, rank)))
        for rank, weights in enumerate(found)
    )


def problem_of(case, found):
    """Why what the ranks found is not what is declared; None if it is."""
    declared = verdict(case)
    refusals = [text for text in found if isinstance(text, str)]
    if declared.kind == "refused":
        good = len(refusals) == len(found) and all(
            declared.reason in text for text in refusals
        )
        return None if good else f"{case}: not refused with {declared.reason!r}"
    if refusals:
        return f"{case}: {refusals[0]}"
    error, tolerance = largest_error(case, found), prepare(case).tolerance
    if (error <= tolerance) == (declared.kind == "works"):
        return None
    return f"{case} is declared {declared.kind}: error {error:.1e} of {tolerance}"


def problems(get_world, tried):
    """What differs from what is declared, of all these cases."""
    found = []
    for ranks in sorted({prepare(case).ranks for case in tried}):
        here = [case for case in tried if prepare(case).ranks == ranks]
        results = get_world(ranks).run(train, here)
        for case, by_rank in zip(here, zip(*results, strict=True), strict=True):
            if problem := problem_of(case, by_rank):
                found.append(problem)
    return found


@pytest.mark.verifies("xtrain_docs.matrix.training:train")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_feature_with_every_other(world, wrapper, feature):
    assert problems(world, cases(wrapper, feature)) == []


@pytest.mark.verifies("xtrain_docs.matrix.training:train")
@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_every_feature_on_a_backend_of_ours(ours, wrapper):
    tried = [(wrapper, name) for name in FEATURES]
    assert problems(ours, tried) == []


# --- these tests can fail -------------------------------------------------------------


def train_without_reducing(tried):
    """`train` under a NaiveDataParallel that keeps its gradients to itself."""
    with replaced(NaiveDataParallel, "reduce_gradients", lambda self: None):
        return train(tried)


@pytest.mark.parametrize("precision", ["adamw", *PRECISIONS])
def test_every_tolerance_is_too_small_for_gradients_that_were_not_reduced(
    world, precision
):
    case = ("naive", precision)
    results = world(2).run(train_without_reducing, [case])
    assert problem_of(case, [found for (found,) in results])


def test_a_sum_is_no_average(world):
    for precision in PRECISIONS:
        case = ("naive", precision, "sum_gradients")
        results = world(2).run(train, [case])
        assert problem_of(case, [found for (found,) in results]) is None
        average = ("naive", precision)
        assert problem_of(average, [found for (found,) in results])


def test_a_refusal_on_one_rank_only_is_a_problem():
    case = ("naive", "join")
    refusal = f"AttributeError: {REFUSED[case]}"
    assert problem_of(case, [refusal, refusal]) is None
    assert problem_of(case, [refusal, reference(case)[1]])
    assert problem_of(case, [refusal, "AttributeError: another"])


def test_what_is_declared_wrong_must_be(monkeypatch):
    case = ("naive", "clip")
    monkeypatch.setitem(WRONG, case, "for this test")
    before, after = reference(case)
    assert problem_of(case, [before, before]) is None
    assert problem_of(case, [after, after])


# --- the declarations -----------------------------------------------------------------


def test_declared_cases_are_of_known_names_and_have_reasons():
    for declared in (REFUSED, WRONG):
        for (wrapper, *names), reason in declared.items():
            assert wrapper in WRAPPERS
            assert set(names) <= FEATURES.keys()
            assert len(names) == 1 or is_pair(*names)
            assert reason


def test_every_declared_refusal_and_every_wrong_case_is_tried():
    tried = {case for w in WRAPPERS for name in FEATURES for case in cases(w, name)}
    assert {*REFUSED, *WRONG} <= tried


def test_nothing_is_tried_that_holds_a_declared_case():
    assert not is_tried(("fsdp", "join", "clip"))
    assert not is_tried(("zero2", "join", "loss_scaler"))
    assert not is_tried(("ddp", "fp32", "bf16"))
    assert is_tried(("ddp", "no_sync", "join"))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_a_row_needs_one_number_of_ranks(wrapper):
    for name in FEATURES:
        assert len({prepare(case).ranks for case in cases(wrapper, name)}) == 1
