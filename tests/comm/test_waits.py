"""The graph of waits: circles that are deadlocks, and waits that are not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.comm.waits import Need, RankWaits, Wait, find_circle, in_words


def waiting(rank: int, *peers: int) -> RankWaits:
    """A rank that waits for what others do next."""
    needs = tuple(Need(peer) for peer in peers)
    return RankWaits(rank, host=Wait(rank, f"recv(src={peers[0]})", needs))


def ranks_of(states) -> list[int]:
    return [wait.rank for wait in find_circle(states)]


@pytest.mark.verifies("xtrain.comm.waits:find_circle")
@pytest.mark.verifies("xtrain.comm.waits:RankWaits")
def test_waits_of_whole_programs():
    circle = [waiting(2, 0), waiting(0, 1), waiting(1, 2), waiting(3, 0)]
    assert ranks_of(circle) == [0, 1, 2]  # and not rank 3, which waits for the circle
    assert ranks_of([waiting(0, 1), waiting(1, 2)]) == []  # rank 2 is not known
    assert ranks_of([waiting(0, 1), waiting(1, 2), RankWaits(2)]) == []  # it computes
    # All needs must be met: rank 2 may still come, rank 1 waits for rank 0.
    assert ranks_of([waiting(0, 2, 1), waiting(1, 0), RankWaits(2)]) == [0, 1]
    assert ranks_of([waiting(0, 0)]) == [0]


def message(kind: str) -> str:
    return f"0>1 {kind}"


@pytest.mark.verifies("xtrain.comm.waits:RankWaits")
def test_what_holds_up_an_event():
    recv = Need(1, "pair", message("recv"), 2)
    first, host = Wait(1, "first", ()), Wait(1, "host", ())
    state = RankWaits(1, host, {"pair": first, "other": host})
    assert state.holding_up(recv) == host  # the program has not come to it
    state.posted[message("recv")] = 1
    assert state.holding_up(recv) == host
    state.posted[message("recv")] = 2
    assert state.holding_up(recv) == first  # its turn has not come
    state.started[message("recv")] = 1
    assert state.holding_up(recv) == first
    state.started[message("recv")] = 2
    assert state.holding_up(recv) is None
    assert RankWaits(1, posted={message("recv"): 2}).holding_up(recv) is None


@pytest.mark.verifies("xtrain.comm.waits:find_circle")
@pytest.mark.verifies("xtrain.comm.waits:in_words")
def test_two_receives_before_two_sends_on_one_queue():
    states = []
    for rank, peer in ((0, 1), (1, 0)):
        own, other = f"{peer}>{rank}", f"{rank}>{peer}"
        recv = Wait(rank, f"recv(src={peer})", (Need(peer, "pair", f"{own} send"),))
        counts = {f"{own} recv": 1, f"{other} send": 1}
        host = Wait(rank, "wait()", (Need(rank, "pair", f"{other} send"),))
        started = {f"{own} recv": 1}
        states.append(RankWaits(rank, host, {"pair": recv}, counts, started))
    circle = find_circle(states)
    assert in_words(circle).splitlines() == [
        "deadlock, each of these calls waits for the next: rank 0 -> rank 1 -> rank 0",
        "  rank 0: recv(src=1) waits for rank 1",
        "  rank 1: recv(src=0) waits for rank 0",
    ]
    # With the send of rank 1 first the program of rank 0 waits, and not in a circle.
    states[1].queues["pair"] = Wait(1, "send(dst=0)", (Need(0, "pair", "1>0 recv"),))
    states[1].started = {"1>0 send": 1}
    assert find_circle(states) == []


@pytest.mark.verifies("xtrain.comm.waits:in_words")
def test_a_wait_for_ones_own_turn_is_told_as_such():
    circle = [Wait(0, "wait() for b", ()), Wait(0, "a", ()), Wait(1, "c", ())]
    assert in_words(circle).splitlines()[1:] == [
        "  rank 0: wait() for b has its turn after the call in the next line",
        "  rank 0: a waits for rank 1",
        "  rank 1: c waits for rank 0",
    ]
    assert in_words([Wait(4, "a", ())]).endswith("rank 4: a waits for rank 4")


@given(st.lists(st.sets(st.integers(0, 7), max_size=4), min_size=8, max_size=8))
@pytest.mark.verifies("xtrain.comm.waits:find_circle")
def test_a_circle_is_found_where_one_is(graph):
    states = [waiting(r, *to) if to else RankWaits(r) for r, to in enumerate(graph)]
    circle = ranks_of(states)
    for rank, following in zip(circle, [*circle[1:], *circle[:1]], strict=True):
        assert following in graph[rank]
    assert circle == [] or min(circle) == circle[0]
    # Ranks that can go on, again and again; who remains is in a circle or behind one.
    left = set(range(8))
    while free := {rank for rank in left if not graph[rank] & left}:
        left -= free
    assert bool(circle) == bool(left)


def test_a_circle_of_a_thousand_ranks():
    states = [waiting(rank, (rank + 1) % 1000) for rank in range(1000)]
    assert ranks_of(states) == list(range(1000))
