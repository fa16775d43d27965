"""Point-to-point: send, receive, and pairs of them that cannot deadlock.

Two blocking calls that wait for each other never return: gloo's send waits for the
matching receive, whatever the size. So a step in which every rank both sends and
receives must *post* both before it waits for either. `exchange` does that for one pair
and `exchange_all` for any number; all algorithms of `xtrain.comm` stand on these two
and on `send` and `recv`.

Ranks: `src` and `dst` are global ranks, as in torch, also when a group is given;
`group_src` and `group_dst` are ranks inside the group.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import check_p2p, group_or_world, rank_and_size
from xtrain.comm.rounds import one_round


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
    check_p2p("recv", tensor, group, written=True)
    landing = (
        tensor
        if tensor.is_contiguous()
        else torch.empty_like(tensor, memory_format=torch.contiguous_format)
    )
    irecv(landing, group=group, tag=tag, group_src=peer).wait()
    if landing is not tensor:
        tensor.copy_(landing)
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
    check_p2p("isend", tensor, group)
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
    check_p2p("irecv", tensor, group, contiguous=True)
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
    """Post all receives and sends (tensor, group rank), then wait for all of them."""
    for work in post_all(sends, recvs, group):
        work.wait()


def post_all(
    sends: list[tuple[Tensor, int]],
    recvs: list[tuple[Tensor, int]],
    group: ProcessGroup | None = None,
    tag: int = 0,
) -> list[dist.Work]:
    """Post all receives and sends (contiguous tensor, group rank), to be waited for.

    Empty tensors send no message. What a rank sends to itself is copied at once. NCCL
    knows no tags.
    """
    me, size = rank_and_size(group)
    group = group_or_world(group)
    for tensor, peer in (*recvs, *sends):
        check_p2p("exchange", tensor, group, contiguous=True)
        if not 0 <= peer < size:
            raise ValueError(f"exchange: group rank {peer} is not in 0..{size - 1}")
    own_sends = [t.detach() for t, peer in sends if peer == me]
    own_recvs = [t.detach() for t, peer in recvs if peer == me]
    if [t.shape for t in own_sends] != [t.shape for t in own_recvs]:
        raise ValueError(
            f"exchange: rank {me} sends {[list(t.shape) for t in own_sends]} to itself "
            f"and receives {[list(t.shape) for t in own_recvs]} from itself"
        )
    for landing, tensor in zip(own_recvs, own_sends, strict=True):
        landing.copy_(tensor)
    recvs = [(t, peer) for t, peer in recvs if peer != me and t.numel() > 0]
    sends = [(t, peer) for t, peer in sends if peer != me and t.numel() > 0]
    if not sends and not recvs:
        return []
    with one_round():
        if batches(group, (recvs or sends)[0][0].device):
            calls = [
                dist.P2POp(dist.irecv, t, group=group, tag=tag, group_peer=p)
                for t, p in recvs
            ]
            calls += [
                dist.P2POp(dist.isend, t, group=group, tag=tag, group_peer=p)
                for t, p in sends
            ]
            return dist.batch_isend_irecv(calls)
        # Receives first: a message that finds its receive posted is not held up.
        works = [group.recv([tensor], peer, tag) for tensor, peer in recvs]
        return works + [group.send([tensor], peer, tag) for tensor, peer in sends]


def batches(group: ProcessGroup, device: torch.device) -> bool:
    """Whether the backend wants what is issued together in one batch, as NCCL does.

    There, unbatched, the kernels of two ranks could wait for each other.
    """
    own = type(group) is ProcessGroup
    return own and group._get_backend(device).supports_coalescing


def ring_shift(
    send: Tensor, recv: Tensor, shift: int = 1, group: ProcessGroup | None = None
) -> None:
    """Rank r sends to rank r + shift and receives from r - shift, around the ring."""
    rank, size = rank_and_size(group)
    exchange_all(
        [(send, (rank + shift) % size)], [(recv, (rank - shift) % size)], group
    )


def refuse_itself(name: str, peer: int, group: ProcessGroup | None) -> None:
    """ValueError for a message to this rank: nobody else could take it."""
    if peer == rank_and_size(group)[0]:
        raise ValueError(
            f"{name}: group rank {peer} is this rank itself: copy the tensor, or use "
            "exchange, which copies what a rank sends to itself"
        )


def group_rank_of(
    name: str, rank: int | None, group_rank: int | None, group: ProcessGroup | None
) -> int:
    """The peer's rank inside the group, from its global or its group rank."""
    _, size = rank_and_size(group)
    if (rank is None) == (group_rank is None):
        raise ValueError(
            f"give exactly one of {name} (global rank) and group_{name}, "
            f"got {name}={rank}, group_{name}={group_rank}"
        )
    members = dist.get_process_group_ranks(group_or_world(group))
    given = rank if group_rank is None else group_rank
    if not isinstance(given, int) or isinstance(given, bool):
        # ReduceOp.SUM == 0, so a misplaced op would pass for rank 0.
        prefix = "" if group_rank is None else "group_"
        raise ValueError(f"{prefix}{name}={given!r} is not a rank number")
    if group_rank is None:
        if rank not in members:
            raise ValueError(
                f"{name}={rank} is not in the group {members} (global ranks)"
            )
        return members.index(rank)
    if not 0 <= group_rank < size:
        raise ValueError(f"group_{name}={group_rank} is not in 0..{size - 1}")
    return group_rank
