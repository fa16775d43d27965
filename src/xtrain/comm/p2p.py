"""Point-to-point: send, receive, and pairs of them that cannot deadlock.

Two blocking calls that wait for each other never return: gloo's send waits for the
matching receive, for any size. So a step in which every rank both sends and
receives must *post* both before it waits for either. `exchange` does that for one pair
and `exchange_all` for any number. Both check what they are given; an algorithm that has
checked its own call uses `post_all`, below them.

Ranks: `src` and `dst` are global ranks, as in torch, also when a group is given;
`group_src` and `group_dst` are ranks inside the group.
"""

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import group_or_world, rank_and_size
from xtrain.comm.local_checks import check_messages, check_peer, check_tensor


def send(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> None:
    """Send `tensor`; returns when its memory may be changed again."""
    isend(tensor, dst, group, tag, group_dst).wait()


def recv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> int:
    """Receive into `tensor` (any strides); returns the sender's global rank."""
    peer = group_rank_of("src", src, group_src, group)
    check_tensor("recv", tensor, group, written=True)
    buffer = (
        tensor
        if tensor.is_contiguous()
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )
    irecv(buffer, group=group, tag=tag, group_src=peer).wait()
    if buffer is not tensor:
        tensor.copy_(buffer)
    return dist.get_global_rank(group_or_world(group), peer)


def isend(
    tensor: Tensor,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_dst: int | None = None,
) -> dist.Work:
    """Start sending; do not touch `tensor` before `.wait()` of the result returned."""
    peer = group_rank_of("dst", dst, group_dst, group)
    check_tensor("isend", tensor, group)
    refuse_itself("isend", peer, group)
    return group_or_world(group).send([tensor.detach().contiguous()], peer, tag)


def irecv(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    tag: int = 0,
    group_src: int | None = None,
) -> dist.Work:
    """Start receiving into `tensor`; it is filled after `.wait()`.

    It must be contiguous; `recv` takes any strides.
    """
    peer = group_rank_of("src", src, group_src, group)
    check_tensor("irecv", tensor, group, contiguous=True)
    refuse_itself("irecv", peer, group)
    return group_or_world(group).recv([tensor.detach()], peer, tag)


def exchange(
    send: Tensor,
    dst: int | None,
    recv: Tensor,
    src: int | None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
    group_src: int | None = None,
) -> None:
    """Send one tensor and receive another at the same time; returns when both are done.

    `send` is untouched; the contiguous `recv` is filled. Either may be empty: then that
    half sends no message, so both ends must agree on the size, as always.
    """
    to_rank = group_rank_of("dst", dst, group_dst, group)
    from_rank = group_rank_of("src", src, group_src, group)
    exchange_all([(send, to_rank)], [(recv, from_rank)], group)


def exchange_all(
    sends: list[tuple[Tensor, int]],
    recvs: list[tuple[Tensor, int]],
    group: ProcessGroup | None = None,
) -> None:
    """Post all receives and sends (tensor, group rank), then wait for all of them.

    What a rank sends to itself is copied.
    """
    me, _ = rank_and_size(group)
    check_messages("exchange", sends, recvs, group)
    own_sends = [t.detach() for t, peer in sends if peer == me]
    own_recvs = [t.detach() for t, peer in recvs if peer == me]
    for buffer, tensor in zip(own_recvs, own_sends, strict=True):
        buffer.copy_(tensor)
    sends = [(t, peer) for t, peer in sends if peer != me]
    recvs = [(t, peer) for t, peer in recvs if peer != me]
    wait_all(post_all(sends, recvs, group))


def post_all(
    sends: list[tuple[Tensor, int]],
    recvs: list[tuple[Tensor, int]],
    group: ProcessGroup | None = None,
    tag: int = 0,
) -> list[dist.Work]:
    """Post messages (contiguous tensor, group rank of another), to be waited for.

    Empty tensors send no message. NCCL ignores tags.
    """
    group = group_or_world(group)
    recvs = [(t, peer) for t, peer in recvs if t.numel() > 0]
    sends = [(t, peer) for t, peer in sends if t.numel() > 0]
    if not sends and not recvs:
        return []
    if follows_nccl(group, (recvs or sends)[0][0].device):
        post = partial(dist.P2POp, group=group, tag=tag)
        calls = [post(dist.irecv, t, group_peer=peer) for t, peer in recvs]
        calls += [post(dist.isend, t, group_peer=peer) for t, peer in sends]
        return dist.batch_isend_irecv(calls)
    # Receives first: a message that finds its receive posted is not held up.
    works = [group.recv([tensor], peer, tag) for tensor, peer in recvs]
    return works + [group.send([tensor], peer, tag) for tensor, peer in sends]


def wait_all(works: list[dist.Work]) -> None:
    """Wait for everything that was posted."""
    for work in works:
        work.wait()


def follows_nccl(group: ProcessGroup, device: torch.device) -> bool:
    """Whether messages on `device` go by NCCL's rules, as also on nccl-rules.

    What is posted together must be one batch, since calls of a communicator run in
    order and would wait for each other; tags are ignored.
    """
    return bool(group._get_backend(device).supports_coalescing)


def ring_shift(
    send: Tensor, recv: Tensor, shift: int = 1, group: ProcessGroup | None = None
) -> None:
    """Rank r sends to rank r + shift and receives from r - shift, around the ring."""
    rank, size = rank_and_size(group)
    exchange_all(
        [(send, (rank + shift) % size)], [(recv, (rank - shift) % size)], group
    )


def refuse_itself(name: str, peer: int, group: ProcessGroup | None) -> None:
    """ValueError for a message to this rank itself."""
    if peer == rank_and_size(group)[0]:
        raise ValueError(
            f"{name}: group rank {peer} is this rank itself: copy the tensor, or use "
            "exchange, which copies what a rank sends to itself"
        )


def group_rank_of(
    name: str, rank: int | None, group_rank: int | None, group: ProcessGroup | None
) -> int:
    """The peer's rank inside the group, from its global or its group rank."""
    check_peer(name, rank, group_rank, group)
    if group_rank is not None:
        return group_rank
    members = dist.get_process_group_ranks(group_or_world(group))
    return members.index(rank)  # type: ignore[arg-type]
