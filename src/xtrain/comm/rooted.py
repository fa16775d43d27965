"""Collectives with a root: one rank has the tensor at the beginning, or at the end.

Each takes the arguments of torch's function of that name and has the same result. Where
torch leaves a tensor undefined (all but the root's after `reduce`), ours leaves it
unchanged.

    broadcast        one has it         -> all have it            binomial tree
    reduce           all have a part    -> one has the sum        binomial tree
    gather           all have a piece   -> one has all pieces     direct
    scatter          one has all pieces -> each has its piece     direct

`src` and `dst` are global ranks, as in torch; `group_src` and `group_dst` are ranks
inside the group.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.calls import check_call, refuse
from xtrain.comm.checks import rank_and_size, shape_of
from xtrain.comm.p2p import exchange_all, group_rank_of
from xtrain.comm.tree import tree_broadcast, tree_reduce


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Copy rank `src`'s tensor into every rank's `tensor`: ceil(log2 N) steps."""
    root = root_of("broadcast", "src", src, group_src, group)
    same = (shape_of(tensor), f"src={root}")  # on all ranks
    check_call("broadcast", group, tensor, compare=same)
    flat = tensor.detach().contiguous().view(-1)
    tree_broadcast(flat, root, group)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def broadcast_naive(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """`broadcast` as one writes it first: the source sends N-1 copies over one link."""
    root = root_of("broadcast_naive", "src", src, group_src, group)
    rank, size = rank_and_size(group)
    same = (shape_of(tensor), f"src={root}")  # on all ranks
    check_call("broadcast_naive", group, tensor, compare=same)
    flat = tensor.detach().contiguous().view(-1)
    if rank == root:
        others = [other for other in range(size) if other != root]
        exchange_all([(flat, other) for other in others], [], group)
    else:
        exchange_all([], [(flat, root)], group)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def reduce(
    tensor: Tensor,
    dst: int | None = None,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Reduce every rank's `tensor` into rank `dst`'s, in place: ceil(log2 N) steps.

    The tensors of the other ranks keep their values (torch leaves them undefined).
    """
    root = root_of("reduce", "dst", dst, group_dst, group)
    rank, _ = rank_and_size(group)
    same = (shape_of(tensor), f"dst={root}")  # on all ranks
    check_call("reduce", group, tensor, op=op, compare=same)
    partial = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    tree_reduce(partial, root, op, group)
    if rank == root:
        tensor.detach().copy_(partial.view(tensor.shape))


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Collect every rank's `tensor` in rank `dst`'s `gather_list`, in rank order.

    `gather_list` is given on `dst` alone; `dst` is 0 unless given. Ranks may have
    different shapes when the list's tensors have them too.
    """
    if dst is None and group_dst is None:
        dst = 0
    root = root_of("gather", "dst", dst, group_dst, group)
    pieces = _list_on_root("gather", "gather_list", gather_list, root, tensor, group)
    if pieces is None:
        exchange_all([(tensor.detach().contiguous(), root)], [], group)
        return
    buffers = [piece.detach().contiguous() for piece in pieces]
    sources = list(enumerate(buffers))
    buffers[root].copy_(tensor.detach())
    exchange_all([], [(t, r) for r, t in sources if r != root], group)
    for piece, buffer in zip(pieces, buffers, strict=True):
        if not piece.is_contiguous():
            piece.detach().copy_(buffer)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Fill every rank's `tensor` with its entry of rank `src`'s `scatter_list`.

    `scatter_list` is given on `src` alone; `src` is 0 unless given. Ranks may have
    different shapes when the list's tensors have them too.
    """
    if src is None and group_src is None:
        src = 0
    root = root_of("scatter", "src", src, group_src, group)
    pieces = _list_on_root("scatter", "scatter_list", scatter_list, root, tensor, group)
    if pieces is None:
        buffer = tensor.detach().contiguous()
        exchange_all([], [(buffer, root)], group)
        if not tensor.is_contiguous():
            tensor.detach().copy_(buffer)
        return
    tensor.detach().copy_(pieces[root].detach())
    outgoing = [(piece.detach().contiguous(), r) for r, piece in enumerate(pieces)]
    exchange_all([(t, r) for t, r in outgoing if r != root], [], group)


def root_of(
    call: str,
    name: str,
    rank: int | None,
    group_rank: int | None,
    group: ProcessGroup | None,
) -> int:
    """`group_rank_of` for a collective: `debug_checks` shows its error to all ranks."""
    try:
        return group_rank_of(name, rank, group_rank, group)
    except ValueError as error:
        rank_and_size(group)  # a rank outside the group raises alone
        refuse(call, group, str(error))


def _list_on_root(
    call: str,
    name: str,
    pieces: list[Tensor] | None,
    root: int,
    tensor: Tensor,
    group: ProcessGroup | None,
) -> list[Tensor] | None:
    """Check the list that only the root passes; None on the other ranks."""
    rank, size = rank_and_size(group)
    shapes = None if pieces is None else [shape_of(piece) for piece in pieces]
    rules = [
        (shapes is None, f"{name} must be None on rank {rank}, the root is {root}")
    ]
    if rank == root:
        own = (shapes or [])[rank : rank + 1]
        rules = [
            (shapes is not None, f"{name} must be given on the root, rank {root}"),
            (
                len(shapes or []) == size,
                f"{name} needs {size} tensors, got {shapes}",
            ),
            (
                own == [shape_of(tensor)],
                f"{name}[{rank}] {own}, tensor {shape_of(tensor)}",
            ),
        ]
    tensors = [tensor, *pieces] if pieces else [tensor]
    one, many = {root: tensor}, dict(enumerate(pieces or []))
    check_call(
        call, group, *tensors, rules=rules, compare=[f"root={root}"],
        sends=one if call == "gather" else many,
        receives=many if call == "gather" else one,
    )  # fmt: skip
    return pieces if rank == root else None
