"""A block cut into chunks: a dense layer's numbers, and the order of its events."""

import pytest

from tests.devices import skip_unless_mistakes_are_told
from tests.expert_parallel.overlap_cases import (
    CASES,
    all_errors,
    auxiliary_errors,
    difference_from_alone,
    errors_in_one_graph,
    frozen_experts,
    names_of_a_pair,
    names_of_prefill,
    prefill_errors,
    refused,
)
from xtrain.expert_parallel.events import ChunkEvent, event, exposed_seconds
from xtrain.testing import expect_error

OVERLAP = "xtrain.expert_parallel.overlap"
CHUNKS = "xtrain.expert_parallel.overlap_chunks"
EVENTS = "xtrain.expert_parallel.events"
RANKS = pytest.mark.parametrize("ranks", [1, 2, 4])


@RANKS
@pytest.mark.verifies(f"{OVERLAP}:OverlappedMoEBlock")
@pytest.mark.verifies(f"{OVERLAP}:run_pair")
@pytest.mark.verifies(f"{CHUNKS}:ForwardChunks")
@pytest.mark.verifies("xtrain.expert_parallel.overlap_backward:BackwardChunks")
@pytest.mark.verifies("xtrain.expert_parallel.dispatch:issue_counts")
def test_overlapped_pairs_equal_a_dense_layer(world, ranks):
    for found in world(ranks).run(all_errors, CASES):
        for case, errors in zip(CASES, found, strict=True):
            assert max(errors) < 1e-12, (case, errors)


@pytest.mark.verifies(f"{OVERLAP}:run_pair")
def test_a_pair_has_the_bits_of_the_two_alone(world):
    for case in CASES:
        assert world(2).run(difference_from_alone, case) == [0.0, 0.0]


@pytest.mark.verifies(f"{CHUNKS}:_Received")
def test_chunks_may_leave_one_graph(world):
    for case in CASES:
        for error in world(2).run(errors_in_one_graph, case):
            assert error < 1e-12, case


@RANKS
@pytest.mark.verifies(f"{OVERLAP}:overlapped_prefill")
def test_prefill_in_turns_equals_a_dense_layer(world, ranks):
    for case in CASES:
        for errors in world(ranks).run(prefill_errors, case):
            assert max(errors) < 1e-12, (case, errors)


def test_losses_of_the_router_reach_all_that_was_before_it(world):
    for errors in world(2).run(auxiliary_errors):
        assert max(errors) < 1e-12


def test_what_has_no_gradient_gets_none(world):
    for error in world(2).run(frozen_experts):
        assert error < 1e-12


# ------------------------------------------------------------------- what comes when

PAIR = """
compute B sum; issue B combine
    compute F attention; issue F counts; compute F shared
wait B combine; wait F counts; issue F dispatch
    compute B mlp
wait F dispatch; issue B dispatch
    compute F mlp
wait B dispatch; issue F combine
    compute B attention
wait F combine; compute F sum
"""
PREFILL = """
compute F0 attention; issue F0 counts; compute F0 shared; wait F0 counts;
issue F0 dispatch
    compute F1 attention; issue F1 counts; compute F1 shared
wait F0 dispatch; wait F1 counts; issue F1 dispatch
    compute F0 mlp
wait F1 dispatch; issue F0 combine
    compute F1 mlp
wait F0 combine; compute F0 sum; issue F1 combine
    compute F0 attention; issue F0 counts; compute F0 shared
wait F1 combine; compute F1 sum; wait F0 counts; issue F0 dispatch
    compute F1 attention; issue F1 counts; compute F1 shared
wait F0 dispatch; wait F1 counts; issue F1 dispatch
    compute F0 mlp
wait F1 dispatch; issue F0 combine
    compute F1 mlp
wait F0 combine; compute F0 sum; issue F1 combine
wait F1 combine; compute F1 sum
"""


def words(text: str) -> list[str]:
    return [part.strip() for part in text.replace("\n", ";").split(";") if part.strip()]


def windows(names: list[str]) -> list[tuple[str, list[str]]]:
    """Each message of rows, and what happened between its issue and its wait."""
    found = []
    for at, name in enumerate(names):
        kind, _, message = name.partition(" ")
        if kind == "issue" and not message.endswith("counts"):
            end = names.index(f"wait {message}", at)
            found.append((message, names[at + 1 : end]))
    return found


def check_windows(names: list[str], last: int) -> None:
    """Every message but the `last` ones has another micro-batch's compute over it; and
    no wait, of counts or of rows, holds it up."""
    found = windows(names)
    for message, between in found[: len(found) - last]:
        batch = message.split()[0]
        others = [
            n for n in between if n.startswith("compute") and f" {batch} " not in n
        ]
        assert others, (message, between)
    for message, between in found:
        assert not [n for n in between if n.startswith("wait")], (message, between)


@pytest.mark.verifies(f"{OVERLAP}:run_pair")
def test_each_message_of_a_pair_lies_under_a_chunk_of_the_other(world):
    for names in world(2).run(names_of_a_pair):
        assert names == words(PAIR)
        assert len(windows(names)) == 4
        check_windows(names, last=0)


@pytest.mark.verifies(f"{OVERLAP}:overlapped_prefill")
def test_each_message_of_prefill_lies_under_a_chunk_of_the_other(world):
    for names in world(2).run(names_of_prefill):
        assert names == words(PREFILL)
        assert len(windows(names)) == 8
        check_windows(names, last=1)


# --------------------------------------------------------------------------- refused


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("moe", "MoE computes or sends otherwise than GShardMoE"),
        ("once a rank", "neither once_a_rank=True nor a placement"),
        ("hidden", r"needs \[T, 6\]"),
        ("twice", "has no finished forward"),
        ("unfinished", "has no finished forward"),
    ],
)
@pytest.mark.verifies(f"{OVERLAP}:check_moe")
def test_what_does_not_fit_is_refused_on_every_rank(world, xtrain_worlds, what, match):
    if what == "hidden":
        skip_unless_mistakes_are_told(xtrain_worlds)
    expect_error(world(2), refused, what, match=match)


# -------------------------------------------------------------------------- events


@pytest.mark.verifies(f"{EVENTS}:event")
@pytest.mark.verifies(f"{EVENTS}:ChunkEvent")
def test_what_is_done_becomes_an_event_where_there_is_a_list():
    events: list[ChunkEvent] = []
    for target in (events, None):
        with event(target, "F", "mlp", "compute"):
            inside = len(events)
    (found,) = events
    assert inside == 1, "nothing is added without a list"
    assert found.name == "compute F mlp"
    assert found.begin <= found.end


@pytest.mark.verifies(f"{EVENTS}:exposed_seconds")
def test_only_waits_are_exposed():
    kinds = (("compute", 4.0), ("issue", 2.0), ("wait", 1.0), ("wait", 0.5))
    events = [ChunkEvent("F", "mlp", kind, 10.0, 10.0 + took) for kind, took in kinds]
    assert exposed_seconds(events) == 1.5
