"""What gloo does where ranks disagree or die: the gloo column of the page on faults.

Nothing here runs our backends. The tests say what we compare them with, and notice when
a new torch does better.
"""

import faulthandler
import re
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.backends.faults import Ranks, stay
from tests.testing.processes import wait_until
from xtrain.testing import World


def own(a, b):
    """What this rank does where ranks 0 and 1 differ: the first or the second."""
    return b if dist.get_rank() == 1 else a


# -------------------------------------------------------- silent, and wrong


def other_dtype():
    """Floats on rank 0, integers of the same width on rank 1: 1.0 and 1."""
    t = own(torch.ones(4), torch.ones(4, dtype=torch.int32))
    dist.all_reduce(t)
    return t.tolist()


def other_reduction():
    t = torch.full((4,), float(dist.get_rank() + 1))
    dist.all_reduce(t, own(dist.ReduceOp.SUM, dist.ReduceOp.MAX))
    return t.tolist()


def other_order():
    a, b = torch.full((2,), 1.0), torch.full((2,), 100.0)
    for t in own((a, b), (b, a)):
        dist.all_reduce(t)
    return a.tolist()


def larger_receive():
    t = own(torch.ones(4), torch.full((8,), 7.0))
    own(dist.send, dist.recv)(t, 1 - dist.get_rank())
    return t.tolist()


def test_gloo_reduces_different_calls_without_an_error(worlds_of):
    world = worlds_of("gloo").get(2)
    floats, integers = world.run(other_dtype)
    assert floats != [2.0] * 4 or integers != [2] * 4  # one adds the other's bits
    # Each rank reduces its chunk its own way: a sum of 3 here, a maximum of 2 there.
    one, two = world.run(other_reduction)
    assert one == two
    assert set(one) == {3.0, 2.0}
    assert world.run(other_order) == [[101.0, 101.0]] * 2  # 2.0 would be right
    assert world.run(larger_receive)[1] == [1.0] * 4 + [7.0] * 4  # half filled


# ------------------------------------------------------------- a process ends


def other_shape():
    dist.all_reduce(torch.ones(own(8, 3)))


def other_width():
    dist.all_reduce(own(torch.ones(8), torch.ones(8, dtype=torch.float64)))


def smaller_receive():
    own(dist.send, dist.recv)(torch.ones(own(4, 2)), 1 - dist.get_rank())


def quietly(say, mistake):
    faulthandler.disable()  # the abort is expected
    mistake()


@pytest.mark.parametrize(
    ("mistake", "victim"), [(other_shape, 1), (other_width, 0), (smaller_receive, 1)]
)
def test_gloo_aborts_the_rank_that_gets_more_than_it_has_room_for(mistake, victim):
    with Ranks("gloo", 2, quietly, mistake) as pair:
        pair[victim].process.join(20)
        assert pair[victim].process.exitcode == -signal.SIGABRT
        word = pair[1 - victim].hear()  # it went on, or lost its connection
        assert word[0] == "ended" or "peer" in word[2], word


# ------------------------------------------------------------------- it hangs


def three_pairs_of_ranks():
    """Each pair makes a mistake in a group that waits for a second."""
    rank = dist.get_rank()
    pairs = [
        dist.new_group([first, first + 1], timeout=timedelta(seconds=1))
        for first in (0, 2, 4)
    ]
    group, second = pairs[rank // 2], rank % 2
    t = torch.ones(4)
    started = time.monotonic()
    text = "returned"
    try:
        if rank < 2 and second:
            dist.broadcast(t, 0, group=group)
        elif rank < 2:
            dist.all_reduce(t, group=group)
        elif rank < 4:
            dist.broadcast(t, rank, group=group)
        else:
            dist.all_reduce(t, group=group)
            if second:
                dist.all_reduce(t, group=group)  # one call too many
    except RuntimeError as error:
        text = str(error)
    waited = time.monotonic() - started
    dist.barrier()  # no rank leaves before the others' time is up
    return text, waited


def test_gloo_waits_for_its_timeout_in_different_calls():
    with World(6) as own_world:
        results = own_world.run(three_pairs_of_ranks)
    *operation_and_root, (fine, _), extra = results
    assert fine == "returned"
    hung = [operation_and_root[:2], operation_and_root[2:], [extra]]
    for pair in hung:  # one gives up, and the other loses its connection
        assert any("Timed out waiting 1000ms" in text for text, _ in pair), pair
        assert max(waited for _, waited in pair) > 0.9, pair


# ------------------------------------------------------------------ rank 3 dies


def waits_for_a_peer(say, pending):
    """Rank 3 never comes; 0 waits for it, 1 for the living 2, or all in all-reduce."""
    rank = dist.get_rank()
    dist.all_reduce(torch.ones(1 << 20))  # every connection has been used
    say("ready")
    if rank == 3:
        stay()
    t = torch.ones(1 << 20)
    if pending == "all-reduce":
        dist.all_reduce(t)
    elif rank < 2:
        dist.recv(t, (3, 2)[rank])


@pytest.mark.parametrize("pending", ["receive", "all-reduce"])
def test_gloo_tells_only_ranks_with_an_operation_pending_with_the_dead(pending):
    with Ranks("gloo", 4, waits_for_a_peer, pending, timeout=2.0) as ranks:
        ranks.hear()
        for rank in ranks.ranks:
            wait_until(rank.sleeps)
        ranks[3].kill()
        words = [ranks[survivor].hear() for survivor in (0, 1, 2)]
    lost = "closed by peer|reset by peer"
    assert re.search(lost, words[0][2])
    assert "Timed out waiting 2000ms" in words[1][2]
    if pending == "all-reduce":  # rank 2 is a neighbour in the ring, 1 is not
        assert re.search(lost, words[2][2])
    else:
        assert words[2] == ("ended", None)
