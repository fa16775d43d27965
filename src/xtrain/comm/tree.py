"""Logarithmic algorithms: fewer steps than a ring, for messages where latency rules.

Binomial tree, 8 ranks, root 0. Broadcast runs down, reduce runs up:

    step 0   0 -> 4
    step 1   0 -> 2   4 -> 6
    step 2   0 -> 1   2 -> 3   4 -> 5   6 -> 7

Every step doubles the number of ranks that have the tensor, so log2(N) steps reach all.
`tree_all_reduce` is a reduce followed by a broadcast: 2 log2(N) steps, but every step
moves the whole tensor. The two, `tree_reduce` and `tree_broadcast`, leave the checks to
the collective that calls them.

`halving_doubling_all_reduce` (Rabenseifner's algorithm; Thakur, Rabenseifner and Gropp,
Optimization of Collective Communication Operations in MPICH, 2005) keeps the ring's
volume with 2 log2(N) steps: pairs of ranks swap halves, then quarters, ... of the
tensor and reduce them, then the same pairs swap the finished pieces in reverse order.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.calls import check_call
from xtrain.comm.checks import rank_and_size
from xtrain.comm.p2p import post_all, wait_all
from xtrain.comm.reduce_op import divide_if_average, fold_into


def tree_broadcast(flat: Tensor, root: int, group: ProcessGroup | None = None) -> None:
    """Copy the root's contiguous tensor to all; `root` is a rank inside the group."""
    rank, size = rank_and_size(group)
    position = (rank - root) % size  # the root sits at position 0
    reach = 1 << (size - 1).bit_length()
    while reach > 1:
        half = reach // 2
        if position % reach == 0 and position + half < size:
            wait_all(post_all([(flat, (rank + half) % size)], [], group))
        elif position % reach == half:
            wait_all(post_all([], [(flat, (rank - half) % size)], group))
        reach = half


def tree_reduce(
    flat: Tensor, root: int, op: ReduceOp.RedOpType, group: ProcessGroup | None = None
) -> None:
    """Reduce contiguous tensors into the root's, in place.

    The others' tensors hold partial results afterwards: use a copy to keep them.
    """
    rank, size = rank_and_size(group)
    position = (rank - root) % size
    incoming = torch.empty_like(flat)
    reach = 1
    while reach < size:
        if position % (2 * reach) == reach:
            wait_all(post_all([(flat, (rank - reach) % size)], [], group))
            return  # this rank's share is on its way to the root
        if position + reach < size:
            wait_all(post_all([], [(incoming, (rank + reach) % size)], group))
            fold_into(flat, incoming, op)
        reach *= 2
    divide_if_average(flat, op, size)


def tree_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place, by a tree up and the same tree down.

    2 ceil(log2 N) steps of the whole tensor: good for small tensors, twice or more the
    ring's volume for large ones.
    """
    check_call("tree_all_reduce", group, tensor, op=op)
    flat = tensor.detach().contiguous().view(-1)
    tree_reduce(flat, 0, op, group)
    tree_broadcast(flat, 0, group)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def halving_doubling_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place: the ring's volume in 2 log2(N) steps.

    When N is not a power of two, each rank beyond the largest power of two below N
    first folds its tensor into a partner's and gets the result back at the end: two
    more steps and one more tensor each way for these pairs.
    """
    rank, size = check_call("halving_doubling_all_reduce", group, tensor, op=op)
    flat = tensor.detach().contiguous().view(-1)
    core = 1 << (size.bit_length() - 1)  # the largest power of two <= size

    if rank >= core:
        wait_all(post_all([(flat, rank - core)], [], group))
        wait_all(post_all([], [(flat, rank - core)], group))
    else:
        if rank + core < size:
            incoming = torch.empty_like(flat)
            wait_all(post_all([], [(incoming, rank + core)], group))
            fold_into(flat, incoming, op)
        _halve_and_double(flat, rank, core, op, group)
        divide_if_average(flat, op, size)
        if rank + core < size:
            wait_all(post_all([(flat, rank + core)], [], group))

    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def _halve_and_double(
    flat: Tensor,
    rank: int,
    size: int,
    op: ReduceOp.RedOpType,
    group: ProcessGroup | None,
) -> None:
    incoming = torch.empty_like(flat[: (flat.numel() + 1) // 2])
    piece, undo = flat, []
    distance = size // 2
    while distance >= 1:  # reduce-scatter: swap halves, reduce the one that is kept
        partner = rank ^ distance
        low, high = piece.tensor_split(2)
        keep, give = (low, high) if rank < partner else (high, low)
        buffer = incoming[: keep.numel()]
        wait_all(post_all([(give, partner)], [(buffer, partner)], group))
        fold_into(keep, buffer, op)
        undo.append((keep, give, partner))
        piece, distance = keep, distance // 2
    for keep, give, partner in reversed(undo):  # all-gather: swap back what is finished
        wait_all(post_all([(keep, partner)], [(give, partner)], group))
