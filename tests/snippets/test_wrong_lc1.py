"""The classic bugs of lc1: each broken twin fails the check that the right code passes.

A check is a function that ranks run: it gets the function under test and asserts what
the tests of the right code assert, with the same helpers. So if one of these bugs crept
into `xtrain.comm`, its tests would fail as they fail here.
"""

import pytest
import torch
import torch.distributed as dist
from snippets.wrong.lc1 import (
    all_send_first,
    foreign_group,
    group_rank_as_src,
    leave_early,
    one_buffer_for_all,
    read_after_reduce,
    read_before_wait,
    reduce_for_all_reduce,
    ring_chunk_index,
    ring_rank_0_first,
    write_before_wait,
)
from torch.distributed import ReduceOp

from tests.comm.reference import (
    assert_reduced,
    assert_same_on_all_ranks,
    input_of,
)
from tests.snippets.gallery import failures, ranks
from xtrain import comm
from xtrain.testing import RankTimeout, expect_error

# ------------------------------------------------------------------ the ring shift


def shift_delivers(shift) -> list:
    """What my left neighbour had arrives here. Returns the messages of this rank."""
    rank, size = ranks()
    mine, incoming = torch.tensor([10.0 + rank]), torch.full((1,), -1.0)
    with comm.CommLedger() as ledger:
        shift(mine, incoming)
    assert incoming.item() == 10 + (rank - 1) % size
    assert mine.item() == 10 + rank
    return ledger.events


def shift_by_exchange(send, recv):
    rank, size = ranks()
    comm.exchange(send, (rank + 1) % size, recv, (rank - 1) % size)


def shift_by_exchange_all(send, recv):
    rank, size = ranks()
    comm.exchange_all([(send, (rank + 1) % size)], [(recv, (rank - 1) % size)])


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies(
    "xtrain.comm.p2p:ring_shift",
    "xtrain.comm.p2p:exchange",
    "xtrain.comm.p2p:exchange_all",
)
def test_all_send_first_is_cut_and_shown(worlds, size):
    for right in (comm.ring_shift, shift_by_exchange, shift_by_exchange_all):
        worlds[size].run(shift_delivers, right)
    with pytest.raises(RankTimeout) as caught:
        worlds[size].run(shift_delivers, all_send_first.ring_shift, timeout=2)
    for report in caught.value.reports:
        right = (report.rank + 1) % size
        assert report.kind == "waiting"
        assert f"waiting in send(tensor=float32[1], dst={right}" in report.summary
        assert "in ring_shift" in report.summary
        assert "snippets/wrong/lc1/all_send_first.py" in report.summary
        assert "in shift_delivers" in report.detail


@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.verifies(
    "xtrain.comm.p2p:ring_shift", "xtrain.comm.message_rounds:message_rounds"
)
def test_rank_0_first_is_right_but_takes_a_round_for_each_rank(worlds, size):
    """Values cannot show this one. Rounds do, and they do not depend on the clock."""
    at_once = worlds[size].run(shift_delivers, comm.ring_shift)
    assert len(comm.message_rounds(at_once)) == 1
    one_by_one = worlds[size].run(shift_delivers, ring_rank_0_first.ring_shift)
    assert len(comm.message_rounds(one_by_one)) == size


# ------------------------------------------------------------------------ the ring


def all_reduce_adds(all_reduce, telling=True) -> None:
    """Every rank holds the sum, and all hold the same bits."""
    rank, size = ranks()
    shape = (5 * size,)
    inputs = [torch.ones(shape) for _ in range(size)]
    if telling:
        inputs = [input_of(r, shape, torch.float32) for r in range(size)]
    tensor = inputs[rank].clone()
    all_reduce(tensor)
    assert_reduced(tensor, inputs, ReduceOp.SUM)
    assert_same_on_all_ranks(tensor)


@pytest.mark.parametrize("size", [3, 4])
@pytest.mark.verifies("xtrain.comm.ring:ring_all_reduce")
def test_a_wrong_chunk_number_needs_telling_data_and_three_ranks(worlds, size):
    wrong = ring_chunk_index.ring_all_reduce
    worlds[size].run(all_reduce_adds, comm.ring_all_reduce)
    assert len(failures(worlds[size], all_reduce_adds, wrong)) == size
    # What hides the bug: equal values, or only two ranks.
    worlds[size].run(all_reduce_adds, wrong, False)
    worlds[2].run(all_reduce_adds, wrong)


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies("xtrain.comm.collectives:all_reduce")
def test_reduce_for_all_reduce_shows_when_every_rank_is_looked_at(worlds, size):
    worlds[size].run(all_reduce_adds, comm.all_reduce)
    failed = failures(worlds[size], sum_is_here, reduce_for_all_reduce.add_up)
    assert failed.keys() == set(range(1, size))  # on rank 0 all is well


def sum_is_here(add_up) -> None:
    """The local half of `all_reduce_adds`: asks nobody, so each rank answers alone."""
    rank, size = ranks()
    inputs = [input_of(r, (4,), torch.float32) for r in range(size)]
    tensor = inputs[rank].clone()
    add_up(tensor)
    dist.barrier()
    assert_reduced(tensor, inputs, ReduceOp.SUM)


def op_in_the_place_of_dst() -> None:
    comm.reduce(torch.ones(2), ReduceOp.SUM)


@pytest.mark.verifies("xtrain.comm.rooted:reduce")
def test_our_reduce_refuses_an_op_for_dst(worlds):
    expect_error(worlds[3], op_in_the_place_of_dst, match="dst=.*SUM")


# ----------------------------------------------------------------- one root's result


def mean_by_all_reduce(loss):
    comm.all_reduce(loss, ReduceOp.AVG)
    return loss


def mean_is_on_every_rank(mean_loss) -> None:
    rank, size = ranks()
    mean = mean_loss(torch.tensor([1.0 + rank]))
    dist.barrier()
    assert mean.item() == (size + 1) / 2


@pytest.mark.parametrize("size", [2, 4])
def test_reading_after_reduce_is_right_on_dst_alone(worlds, size):
    worlds[size].run(mean_is_on_every_rank, mean_by_all_reduce)
    failed = failures(worlds[size], mean_is_on_every_rank, read_after_reduce.mean_loss)
    assert failed.keys() == set(range(1, size))


# -------------------------------------------------------------------------- buffers


def counts_arrive(exchange_counts, by_sender=True) -> None:
    """Rank r's count for rank t arrives at t, in place r."""
    rank, size = ranks()
    table = [[100 * by_sender * r + t + 1 for t in range(size)] for r in range(size)]
    assert exchange_counts(table[rank]) == [row[rank] for row in table]


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.verifies("xtrain.comm.all_to_all:exchange_split_sizes")
def test_one_buffer_for_all_needs_counts_that_differ_by_sender(worlds, size):
    wrong = one_buffer_for_all.exchange_counts
    worlds[size].run(counts_arrive, comm.exchange_split_sizes)
    assert len(failures(worlds[size], counts_arrive, wrong)) == size
    # What hides the bug: everybody sends the same counts.
    worlds[size].run(counts_arrive, wrong, False)


def send_and_wait(value):
    tensor = torch.full((3,), value)
    if dist.get_rank() == 0:
        work = comm.isend(tensor, 1)
        dist.barrier()
        work.wait()
        tensor.zero_()  # now it may change
        return torch.full((3,), value)
    dist.barrier()
    comm.recv(tensor, 0)
    return tensor


def receive_and_wait(value):
    tensor = torch.zeros(3)
    if dist.get_rank() == 0:
        dist.barrier()
        comm.send(torch.full((3,), value), 1)
        return torch.full((3,), value)
    work = comm.irecv(tensor, 0)
    dist.barrier()
    work.wait()
    return 2 * tensor / 2


def transfer_delivers(transfer) -> None:
    received = transfer(7.0)
    assert dist.get_rank() == 0 or received.tolist() == [7.0] * 3


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (send_and_wait, write_before_wait.transfer),
        (receive_and_wait, read_before_wait.transfer),
    ],
)
@pytest.mark.verifies("xtrain.comm.p2p:isend", "xtrain.comm.p2p:irecv")
def test_a_buffer_belongs_to_the_message_until_the_wait(worlds, right, wrong):
    worlds[2].run(transfer_delivers, right)
    assert failures(worlds[2], transfer_delivers, wrong).keys() == {1}


def leaves_early() -> None:
    leave_early.program()


def waits_and_leaves_together() -> None:
    tensor = torch.full((3,), 7.0)
    if dist.get_rank() == 0:
        comm.isend(tensor, 1).wait()
    else:
        comm.recv(tensor.zero_(), 0)
    dist.barrier()
    dist.destroy_process_group()
    assert tensor.tolist() == [7.0] * 3


def test_leaving_early_breaks_the_one_who_stays(worlds):
    worlds[2].run(waits_and_leaves_together)
    # Ranks of a World live on, so here the connection stays and the receive waits.
    failed = failures(worlds[2], leaves_early, timeout=2)
    assert failed.keys() == {1}
    assert "waiting in recv" in failed[1] or "Connection closed" in failed[1]


# --------------------------------------------------------------------------- groups


def from_first(tensor, group):
    comm.broadcast(tensor, group_src=0, group=group)


def from_second(tensor, group):
    comm.broadcast(tensor, group_src=1, group=group)


def member_shares(share, place) -> None:
    """In the group of ranks 1, 2 and 3 everybody gets what member `place` has."""
    rank, _ = ranks()
    group = dist.new_group([1, 2, 3])
    tensor = torch.tensor([10 * rank])
    if rank > 0:
        share(tensor, group)
        assert tensor.item() == 10 * (1 + place)


@pytest.mark.parametrize(
    ("place", "right", "wrong", "symptom"),
    [
        (0, from_first, group_rank_as_src.share_from_first, "ValueError"),
        (1, from_second, group_rank_as_src.share_from_second, "AssertionError"),
    ],
)
@pytest.mark.verifies("xtrain.comm.p2p:group_rank_of")
def test_a_group_rank_is_no_global_rank(worlds, place, right, wrong, symptom):
    worlds[4].run(member_shares, right, place)
    failed = failures(worlds[4], member_shares, wrong, place)
    assert failed.keys() == {1, 2, 3}
    assert all(symptom in said for said in failed.values())


def my_half(tensor, halves):
    comm.all_reduce(tensor, group=halves[dist.get_rank() // 2])


def first_half_with_ours(tensor, halves):
    comm.all_reduce(tensor, group=halves[0])


def halves_add_up(sum_by_halves) -> None:
    rank, _ = ranks()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    tensor = torch.tensor([10.0**rank])
    sum_by_halves(tensor, halves)
    assert tensor.item() == (11.0 if rank < 2 else 1100.0)


@pytest.mark.filterwarnings("ignore:Running all_reduce")
@pytest.mark.verifies("xtrain.comm.checks:rank_and_size")
def test_a_foreign_group_does_nothing_in_torch_and_raises_in_ours(worlds):
    worlds[4].run(halves_add_up, my_half)
    failed = failures(worlds[4], halves_add_up, foreign_group.sum_by_halves)
    assert failed.keys() == {2, 3}
    assert all("AssertionError" in said for said in failed.values())
    refused = failures(worlds[4], halves_add_up, first_half_with_ours)
    assert refused.keys() == {2, 3}
    assert all("is not a member of this group" in said for said in refused.values())
