"""Every call of `xtrain.comm` inside a group of some of the ranks.

Of four ranks 1 and 3 work in one group while 0 and 2 work in the other, on data of
another size and dtype. A message that forgot its group would go to group rank 0 or 1 of
the world: to the other group, or to oneself. A check that forgot it would compare calls
that differ.
"""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ReduceOp

from tests.comm.reference import assert_reduced, check_all_reduce, input_of
from xtrain import comm
from xtrain.comm.collective_choice import DIRECT, RING, TORCH
from xtrain.comm.direct import (
    direct_all_gather,
    direct_all_reduce,
    direct_reduce_scatter,
)
from xtrain.comm.ring_pass import RingPass
from xtrain.comm.tree import tree_broadcast, tree_reduce

HALVES = [0, 2], [1, 3]


def mine_and_all(members, shape=None):
    """What this rank brings, and what each member does: group ranks in order.

    Whole numbers, whose sums are exact. Without a shape there is a row for each member.
    """
    half, shape = members[0] % 2, shape or (len(members), 5)
    dtype, shape = (torch.float32, torch.float64)[half], (*shape[:-1], shape[-1] + half)
    inputs = [input_of(rank, shape, dtype).mul(1000).round() for rank in members]
    return inputs[members.index(dist.get_rank())].clone(), inputs


def all_reduces(group, members, me):
    for name in ALL_REDUCES:
        for shape in ((7,), (30_011,)):  # `all_reduce` takes the tree, then the ring
            mine, inputs = mine_and_all(members, shape)
            getattr(comm, name)(mine, ReduceOp.AVG, group)
            assert_reduced(mine, inputs, ReduceOp.AVG)


def hierarchical(group, members, me):
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    for intra, inter in ((group, alone), (alone, group)):
        mine, inputs = mine_and_all(members, (7,))
        comm.hierarchical_all_reduce(mine, ReduceOp.AVG, intra, inter)
        assert_reduced(mine, inputs, ReduceOp.AVG)


def direct(group, members, me):
    mine, inputs = mine_and_all(members)
    total = sum(inputs)
    part, whole = torch.empty_like(mine[0]), torch.empty_like(torch.stack(inputs))
    direct_reduce_scatter(part, mine, group=group).wait()
    assert torch.equal(part, total[me])
    direct_all_gather(whole, mine, group).wait()
    assert torch.equal(whole, torch.stack(inputs))
    for numel in (10, 9):  # 9 is padded
        mine, inputs = mine_and_all(members, (numel,))
        direct_all_reduce(mine, group=group).wait()
        assert torch.equal(mine, sum(inputs))


def chosen(group, members, me):
    """Each choice of collectives for training."""
    for choice in (TORCH, RING, DIRECT):
        mine, inputs = mine_and_all(members)
        part, whole = torch.empty_like(mine[0]), torch.empty_like(torch.stack(inputs))
        choice.reduce_scatter(part, mine.view(-1), group=group).wait()
        assert torch.equal(part, sum(inputs)[me])
        choice.all_gather(whole.view(-1), mine.view(-1), group=group).wait()
        assert torch.equal(whole, torch.stack(inputs))
        choice.all_reduce(mine, group=group).wait()
        assert torch.equal(mine, sum(inputs))


def scattered(group, members, me):
    for reduce_scatter in (comm.ring_reduce_scatter, comm.reduce_scatter_tensor):
        mine, inputs = mine_and_all(members)
        part = torch.empty_like(mine[0])
        reduce_scatter(part, mine, group=group)
        assert torch.equal(part, sum(inputs)[me])
        part = torch.empty_like(mine[0])
        comm.reduce_scatter(part, list(mine), group=group)
        assert torch.equal(part, sum(inputs)[me])


def gathered(group, members, me):
    mine, inputs = mine_and_all(members)
    for all_gather in (comm.ring_all_gather, comm.all_gather_into_tensor):
        whole = torch.empty_like(torch.stack(inputs))
        all_gather(whole, mine, group=group)
        assert torch.equal(whole, torch.stack(inputs))
    outputs = [torch.empty_like(mine) for _ in members]
    comm.all_gather(outputs, mine, group)
    assert all(map(torch.equal, outputs, inputs))


def rooted(group, members, me):
    for root, member in enumerate(members):
        on_root = me == root
        for named, where in (("", member), ("group_", root)):
            src, dst = {f"{named}src": where}, {f"{named}dst": where}
            for broadcast in (comm.broadcast, comm.broadcast_naive):
                mine, inputs = mine_and_all(members)
                broadcast(mine, group=group, **src)
                assert torch.equal(mine, inputs[root])
            mine, inputs = mine_and_all(members)
            comm.reduce(mine, group=group, **dst)
            assert torch.equal(mine, sum(inputs) if on_root else inputs[me])
            pieces = [torch.empty_like(mine) for _ in members] if on_root else None
            comm.gather(inputs[me], pieces, group=group, **dst)
            assert all(map(torch.equal, pieces or inputs, inputs))
            landing = torch.empty_like(mine)
            comm.scatter(landing, pieces, group=group, **src)
            assert torch.equal(landing, inputs[me])
        mine, inputs = mine_and_all(members)
        tree_broadcast(mine, root, group)
        assert torch.equal(mine, inputs[root])
        mine, inputs = mine_and_all(members)
        tree_reduce(mine, root, ReduceOp.SUM, group)
        assert not on_root or torch.equal(mine, sum(inputs))


def all_to_all(group, members, me):
    rows = [[2, 3], [1, 4]]  # of the sender's tensor, by group rank
    mine, inputs = mine_and_all(members, (5, 3))
    arriving = comm.exchange_split_sizes(rows[me], group)
    assert arriving == [row[me] for row in rows]
    expected = [t.split(row)[me] for t, row in zip(inputs, rows, strict=True)]
    for call in (comm.all_to_all_single, comm.all_to_all_single_async):
        output = torch.empty_like(torch.cat(expected))
        handle = call(output, mine, arriving, rows[me], group)
        if handle is not None:
            handle.wait()
        assert torch.equal(output, torch.cat(expected))
    for call in (comm.all_to_all, comm.all_to_all_async):
        outputs = [torch.empty_like(t) for t in expected]
        handle = call(outputs, list(mine.split(rows[me])), group)
        if handle is not None:
            handle.wait()
        assert all(map(torch.equal, outputs, expected))


def point_to_point(group, members, me):
    mine, inputs = mine_and_all(members)
    other, landing = members[1 - me], torch.empty_like(mine)
    for by_group in (True, False):
        to = {"group_dst": 1 - me} if by_group else {"dst": other}
        sender = {"group_src": 1 - me} if by_group else {"src": other}
        if me == 0:
            comm.send(mine, group=group, **to)
            comm.isend(mine, group=group, **to).wait()
        else:
            assert comm.recv(landing, group=group, **sender) == other
            assert torch.equal(landing, inputs[0])
            comm.irecv(landing.zero_(), group=group, **sender).wait()
            assert torch.equal(landing, inputs[0])
        ends = {"dst": None, "src": None} | to | sender
        comm.exchange(send=mine, recv=landing.zero_(), group=group, **ends)
        assert torch.equal(landing, inputs[1 - me])
    comm.exchange_all([(mine, 1 - me)], [(landing.zero_(), 1 - me)], group)
    assert torch.equal(landing, inputs[1 - me])
    comm.ring_shift(mine, landing.zero_(), group=group)
    assert torch.equal(landing, inputs[1 - me])
    ring = RingPass(group)
    ring.start(mine, landing.zero_())
    ring.wait()
    assert torch.equal(landing, inputs[1 - me])
    ring.post_recvs([landing.zero_()])
    ring.start(mine, landing)
    ring.wait()
    assert torch.equal(landing, inputs[1 - me])


def objects(group, members, me):
    rank = dist.get_rank()
    assert comm.all_gather_object(f"{rank}" * rank, group) == [
        f"{member}" * member for member in members
    ]
    for root, member in enumerate(members):
        assert comm.broadcast_object(rank, group_src=root, group=group) == member
        assert comm.broadcast_object(rank, src=member, group=group) == member
    if me == 0:
        comm.send_object({"from": rank}, members[1], group)
        comm.send_object([rank], group=group, group_dst=1)
    else:
        assert comm.recv_object(members[0], group) == {"from": members[0]}
        assert comm.recv_object(group=group, group_src=0) == [members[0]]


def barrier(group, members, me):
    token, last = torch.full((1,), float(me)), len(members) - 1
    comm.broadcast(token, group=group, group_src=last)
    assert token.item() == last
    if members[0] == 0:  # the other group has none
        comm.barrier(group)


def refused(group, members, me):
    """Bad input in the group of 0 and 2; the other goes on."""
    comm.ring_shift(torch.ones(1), torch.ones(1), group=group)
    if members[0] == 1:
        return
    for call, match in (
        (lambda: comm.exchange_split_sizes([1, 2, 3], group), "needs 2 sizes"),
        (lambda: comm.broadcast(torch.ones(2), src=1, group=group), "src=1 is not in"),
        (lambda: comm.ring_all_reduce(torch.ones(2), None, group), "reduce op None"),
    ):
        with pytest.raises(ValueError, match=match) as error:
            call()
        assert not re.search("rank [13]: ", str(error.value))


ALL_REDUCES = (
    "all_reduce",
    "ring_all_reduce",
    "tree_all_reduce",
    "halving_doubling_all_reduce",
    "parameter_server_all_reduce",
    "one_shot_all_reduce",
)
CASES = (
    all_reduces, hierarchical, direct, chosen, scattered, gathered, rooted, all_to_all,
    point_to_point, objects, barrier, refused,
)  # fmt: skip


def my_half():
    """This rank's group, the global ranks in it, and the rank inside it."""
    groups = [dist.new_group(half) for half in HALVES]
    me, half = divmod(dist.get_rank(), 2)
    return groups[half], HALVES[half], me


def in_both_halves(case, checked: bool) -> None:
    group, members, me = my_half()
    with comm.debug_checks(checked), comm.CommLedger() as ledger:
        case(group, members, me)
    peers = {event.peer for event in ledger.events} - {None}
    assert peers == {members[1 - me]}, f"spoke to {peers}, the group is {members}"


@pytest.mark.verifies(
    "xtrain.comm.all_to_all:all_to_all",
    "xtrain.comm.collective_choice:Collectives",
    "xtrain.comm.direct:direct_all_gather",
    "xtrain.comm.direct:direct_all_reduce",
    "xtrain.comm.direct:direct_reduce_scatter",
    "xtrain.comm.hierarchical:hierarchical_all_reduce",
    "xtrain.comm.ring:ring_all_gather",
    "xtrain.comm.ring:ring_reduce_scatter",
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_two_groups_work_side_by_side(world, case):
    for checked in (False, True):
        world(4).run(in_both_halves, case, checked)


def every_all_reduce(name: str) -> None:
    group, _, _ = my_half()
    check_all_reduce(getattr(comm, name), group, shapes=((7,), (), (2, 3)))


@pytest.mark.verifies(
    "xtrain.comm.one_shot:one_shot_all_reduce",
    "xtrain.comm.parameter_server:parameter_server_all_reduce",
    "xtrain.comm.ring:ring_all_reduce",
    "xtrain.comm.tree:halving_doubling_all_reduce",
    "xtrain.comm.tree:tree_all_reduce",
)
@pytest.mark.parametrize("name", ALL_REDUCES)
def test_every_operation_of_every_all_reduce_in_two_groups(world, name):
    world(4).run(every_all_reduce, name)


def in_groups_of_any_ranks() -> None:
    """src and dst are global ranks; group_src and group_dst are ranks in the group."""
    rank = dist.get_rank()
    for ranks in ([2, 3], [1, 3], [3, 1, 2], [0]):
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        members = dist.get_process_group_ranks(group)
        me = members.index(rank)
        for case in (scattered, gathered, rooted, barrier):
            case(group, members, me)
        comm.barrier(group)
        check_all_reduce(comm.all_reduce, group, shapes=((7,), ()))
        landing = torch.zeros(2)
        right, left = members[(me + 1) % len(members)], members[me - 1]
        comm.exchange(torch.full((2,), float(rank)), right, landing, left, group=group)
        assert landing.tolist() == [left, left]


@pytest.mark.verifies(
    "xtrain.comm.rooted:broadcast",
    "xtrain.comm.rooted:broadcast_naive",
    "xtrain.comm.rooted:reduce",
    "xtrain.comm.rooted:gather",
    "xtrain.comm.rooted:scatter",
    "xtrain.comm.collectives:all_gather",
    "xtrain.comm.collectives:reduce_scatter",
    "xtrain.comm.collectives:all_reduce",
    "xtrain.comm.collectives:barrier",
    "xtrain.comm.p2p:exchange",
    "xtrain.comm.p2p:group_rank_of",
)
def test_groups_of_any_ranks(world):
    world(4).run(in_groups_of_any_ranks)
