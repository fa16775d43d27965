"""Send, receive, and the exchanges that all algorithms stand on."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.comm.reference import FLOATS, INTS, LAYOUTS, SHAPES, Laid, input_of
from xtrain.comm import (
    CommLedger,
    exchange,
    exchange_all,
    irecv,
    isend,
    message_rounds,
    recv,
    ring_shift,
    send,
)
from xtrain.comm.p2p import follows_nccl, group_rank_of, post_all, wait_all

DTYPES = FLOATS + INTS


def send_and_receive() -> None:
    """Every dtype, shape and layout, both ways, between ours and with torch."""
    rank = dist.get_rank()
    if rank > 1:
        return
    other = 1 - rank
    cases = itertools.product(SHAPES, LAYOUTS)
    for case, (shape, layout) in enumerate(cases):
        dtype = DTYPES[case % len(DTYPES)]
        values = [input_of(r, shape, dtype, case) for r in range(2)]
        if case % 2 == rank:
            mine = Laid(values[rank], layout)
            if case % 3 == 0:
                send(mine.tensor, other)
            elif case % 3 == 1:
                isend(mine.tensor, group_dst=other).wait()
            else:
                dist.send(mine.tensor.contiguous(), other)  # torch to ours
            mine.assert_untouched()
        else:
            landing = Laid(torch.ones_like(values[rank]), layout)
            if case % 5 < 4:
                assert recv(landing.tensor, src=other) == other
            else:
                target = landing.tensor.clone(memory_format=torch.contiguous_format)
                irecv(target, group_src=other).wait()
                landing.tensor.copy_(target)
            assert torch.equal(landing.tensor, values[other]), (shape, layout, dtype)
            landing.assert_surroundings_untouched()
    leaf = torch.nn.Parameter(torch.full((2,), float(rank)))
    if rank == 0:
        send(leaf, 1)
    else:
        recv(leaf, 0)
        assert leaf.tolist() == [0, 0]
    assert leaf.requires_grad
    assert leaf.is_leaf


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.verifies(
    "xtrain.comm.p2p:send",
    "xtrain.comm.p2p:recv",
    "xtrain.comm.p2p:isend",
    "xtrain.comm.p2p:irecv",
)
def test_send_and_receive(world, size):
    world(size).run(send_and_receive)


def in_order() -> bool:
    """Whether messages of two ranks are in the order of the calls, as with NCCL."""
    return follows_nccl(dist.group.WORLD, torch.get_default_device())


def tags_and_order() -> None:
    """Messages with a tag find the receive with that tag; without, order counts."""
    rank = dist.get_rank()
    tensors = [torch.full((2,), float(value)) for value in range(3)]
    # NCCL knows no tags: its messages keep their order.
    order = (0, 1, 2) if in_order() else (2, 0, 1)
    if rank == 0:
        works = [isend(t, 1, tag=tag) for tag, t in enumerate(tensors)]
    else:
        landings = [torch.empty(2) for _ in tensors]
        works = [irecv(landings[tag], 0, tag=tag) for tag in order]
    for work in works:
        work.wait()
    if rank == 1:
        assert all(map(torch.equal, landings, tensors))
    for value in tensors:
        if rank == 0:
            send(value, 1)
        else:
            landing = torch.empty(2)
            recv(landing, 0)
            assert torch.equal(landing, value)


def posted_before_waited() -> None:
    """Many receives at once, filled by sends that come in another order.

    With NCCL all ranks go through the pairs in one order, the lower rank sends first.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    landings = [torch.empty(3) for _ in range(size)]
    others = [peer for peer in range(size) if peer != rank]
    posts = [("recv", peer) for peer in others]
    posts += [("send", peer) for peer in reversed(others)]
    if in_order():
        posts.sort(key=lambda post: (post[1], (post[0] == "send") == (rank > post[1])))
    works = []
    for kind, peer in posts:
        if kind == "recv":
            works.append(irecv(landings[peer], peer))
        else:
            works.append(isend(torch.full((3,), 10.0 * rank + peer), peer))
    for work in reversed(works):
        work.wait()
    for src in others:
        assert landings[src].tolist() == [10.0 * src + rank] * 3


@pytest.mark.verifies("xtrain.comm.p2p:isend", "xtrain.comm.p2p:irecv")
def test_asynchronous_messages(world):
    world(2).run(tags_and_order)
    world(4).run(posted_before_waited)


def exchanges(exchange=exchange, ring_shift=ring_shift, empty_sends=False) -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    for case, (shape, dtype) in enumerate(itertools.product(SHAPES, DTYPES)):
        if case % 4:
            continue
        for shift in (1, -1, 2, 0, size + 1):
            to_rank, from_rank = (rank + shift) % size, (rank - shift) % size
            inputs = [input_of(r, shape, dtype, case) for r in range(size)]
            mine = inputs[rank].clone()
            landing = Laid(torch.ones_like(mine), "offset")
            ring_shift(mine, landing.tensor, shift)
            assert torch.equal(landing.tensor, inputs[from_rank]), (shift, shape)
            assert torch.equal(mine, inputs[rank])
            landing.assert_surroundings_untouched()

            landing = torch.ones_like(mine)
            if case % 8:
                exchange(mine, to_rank, landing, from_rank)
            else:
                exchange(
                    mine, None, landing, None, group_dst=to_rank, group_src=from_rank
                )
            assert torch.equal(landing, inputs[from_rank])

    # The two halves may differ in size and dtype; an empty one sends nothing.
    right, left = (rank + 1) % size, (rank - 1) % size
    sizes = [(r + 1) % 3 for r in range(size)]
    landing = torch.empty(sizes[left], dtype=torch.int32)
    with CommLedger() as ledger:
        exchange(
            torch.full((sizes[rank],), rank, dtype=torch.int32), right, landing, left
        )
    assert landing.tolist() == [left] * sizes[left]
    if size > 1:
        assert ledger.messages == (sizes[rank] > 0 or empty_sends)

    # Leaves that want gradients, also to oneself.
    for shift in (0, 1):
        leaf = torch.nn.Parameter(torch.full((2,), float(rank)))
        target = torch.zeros(2, requires_grad=True)
        ring_shift(leaf, target, shift)
        assert target.tolist() == [(rank - shift) % size] * 2
        assert target.is_leaf


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.verifies("xtrain.comm.p2p:exchange", "xtrain.comm.p2p:ring_shift")
def test_exchanges_around_the_ring(world, size):
    world(size).run(exchanges)


def everyone_with_everyone() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    sends = [(torch.full((r + 1,), 10.0 * rank + r), r) for r in range(size)]
    landings = [torch.empty(rank + 1) for _ in range(size)]
    recvs = [(landings[r], r) for r in range(size)]
    exchange_all(sends, recvs[::-1])
    for src, landing in enumerate(landings):
        assert landing.tolist() == [10.0 * src + rank] * (rank + 1)

    # Two messages between the same two ranks keep their order.
    right, left = (rank + 1) % size, (rank - 1) % size
    pair = [torch.tensor([rank, n]) for n in range(2)]
    landings = [torch.empty(2, dtype=torch.int64) for _ in range(2)]
    sends, recvs = [(t, right) for t in pair], [(t, left) for t in landings]
    exchange_all(sends, recvs)
    assert [t.tolist() for t in landings] == [[left, 0], [left, 1]]
    if size > 1:  # it sends to others alone
        for landing in landings:
            landing.fill_(-1)
        wait_all(post_all(sends, recvs))
        assert [t.tolist() for t in landings] == [[left, 0], [left, 1]]
    assert post_all([], []) == []
    assert post_all([(torch.empty(0), right)], [(torch.empty(0), left)]) == []

    # What does not fit together is refused before a message leaves.
    two, three = torch.ones(2), torch.ones(3)
    for bad in (
        lambda: exchange_all([(two, rank)], []),
        lambda: exchange_all([], [(two, rank)]),
        lambda: exchange_all([(two, rank)], [(three, rank)]),
        lambda: exchange_all([(two, right)], [(three, size)]),
    ):
        with (
            CommLedger() as ledger,
            pytest.raises(ValueError, match=r"to itself|group rank"),
        ):
            bad()
        assert ledger.events == []


@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
@pytest.mark.verifies("xtrain.comm.p2p:exchange_all", "xtrain.comm.p2p:post_all")
def test_any_number_of_messages_at_once(world, size):
    world(size).run(everyone_with_everyone)


def shift_trace():
    with CommLedger() as ledger:
        ring_shift(torch.ones(2), torch.empty(2))
    return ledger.events


@pytest.mark.verifies("xtrain.comm.p2p:ring_shift", "xtrain.comm.p2p:post_all")
def test_a_ring_shift_is_one_round(world):
    """Nobody waits before both of its messages are posted, so no link stays idle."""
    for size in (2, 3, 4, 8):
        rounds = message_rounds(world(size).run(shift_trace))
        assert [len(messages) for messages in rounds] == [size]


def rank_translation() -> None:
    rank = dist.get_rank()
    group = dist.new_group([3, 1])
    assert group_rank_of("src", 2, None, None) == 2
    assert group_rank_of("src", None, 2, None) == 2
    if rank in (1, 3):
        members = dist.get_process_group_ranks(group)
        for position, member in enumerate(members):
            assert group_rank_of("src", member, None, group) == position
            assert group_rank_of("src", None, position, group) == position
            assert dist.get_group_rank(group, member) == position
        for wrong in (0, 2, 4, -1):
            with pytest.raises(ValueError, match=rf"dst={wrong} is not in the group"):
                group_rank_of("dst", wrong, None, group)
        for wrong in (2, 3, -1):
            with pytest.raises(ValueError, match=rf"group_dst={wrong} is not in 0..1"):
                group_rank_of("dst", None, wrong, group)
        with pytest.raises(ValueError, match=r"src=1, group_src=0"):
            group_rank_of("src", 1, 0, group)

        # Messages name global ranks, also inside the group.
        other = 4 - rank
        landing = torch.empty(1)
        exchange(torch.tensor([float(rank)]), other, landing, other, group)
        assert landing.item() == other
        if rank == 1:
            send(torch.ones(1), 3, group)
        else:
            assert recv(landing, group=group, group_src=members.index(1)) == 1
        ring_shift(torch.tensor([float(rank)]), landing, group=group)
        assert landing.item() == other


@pytest.mark.verifies(
    "xtrain.comm.p2p:group_rank_of",
    "xtrain.comm.p2p:exchange",
    "xtrain.comm.p2p:send",
    "xtrain.comm.p2p:recv",
    "xtrain.comm.p2p:ring_shift",
)
def test_global_and_group_ranks(world):
    world(4).run(rank_translation)
