"""The collectives of torch.distributed, from send and receive alone.

Each takes the arguments of its torch twin and leaves the same result. Where torch
leaves a tensor undefined (all but the root's after `reduce`), ours leaves it unchanged.

    broadcast        one has it         -> all have it            binomial tree
    reduce           all have a part    -> one has the sum        binomial tree
    all_reduce       all have a part    -> all have the sum       tree or ring, by size
    gather           all have a piece   -> one has all pieces     direct
    scatter          one has all pieces -> each has its piece     direct
    all_gather       all have a piece   -> all have all pieces    ring
    reduce_scatter   all have a part    -> each has a piece of the sum    ring
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.checks import (
    check_call,
    message_device,
    rank_and_size,
    refuse,
    shape_of,
)
from xtrain.comm.p2p import exchange_all, group_rank_of, ring_shift
from xtrain.comm.reduce_op import divide_if_average, fold_into
from xtrain.comm.ring import (
    all_gather_chunks,
    reduce_scatter_chunks,
    ring_all_gather,
    ring_reduce_scatter,
)
from xtrain.comm.tree import tree_broadcast, tree_reduce

TREE_MAX_BYTES = 64 * 1024  # up to here fewer steps beat less volume


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Copy rank `src`'s tensor into everybody's `tensor`: ceil(log2 N) steps."""
    root = root_of("broadcast", "src", src, group_src, group)
    check_call("broadcast", group, tensor, compare=(shape_of(tensor), f"src={root}"))
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
    rank, size = check_call(
        "broadcast_naive",
        group,
        tensor,
        compare=(shape_of(tensor), f"src={root}"),
    )
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
    """Reduce everybody's `tensor` into rank `dst`'s, in place: ceil(log2 N) steps.

    The tensors of the other ranks keep their values (torch leaves them undefined).
    """
    root = root_of("reduce", "dst", dst, group_dst, group)
    shape = shape_of(tensor)
    rank, _ = check_call("reduce", group, tensor, op=op, compare=(shape, f"dst={root}"))
    partial = tensor.detach().clone(memory_format=torch.contiguous_format).view(-1)
    tree_reduce(partial, root, op, group)
    if rank == root:
        tensor.detach().copy_(partial.view(tensor.shape))


def all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place, on every rank.

    A small tensor takes the tree (few steps), a large one the ring (least volume).
    """
    _, size = check_call("all_reduce", group, tensor, op=op)
    flat = tensor.detach().contiguous().view(-1)
    if flat.nbytes <= TREE_MAX_BYTES:
        tree_reduce(flat, 0, op, group)
        tree_broadcast(flat, 0, group)
    else:
        chunks = flat.tensor_split(size)
        reduce_scatter_chunks(chunks, op, group)
        all_gather_chunks(chunks, group)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def gather(
    tensor: Tensor,
    gather_list: list[Tensor] | None = None,
    dst: int | None = None,
    group: ProcessGroup | None = None,
    group_dst: int | None = None,
) -> None:
    """Collect everybody's `tensor` in rank `dst`'s `gather_list`, in rank order.

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
    landings = [piece.detach().contiguous() for piece in pieces]
    sources = list(enumerate(landings))
    landings[root].copy_(tensor.detach())
    exchange_all([], [(t, r) for r, t in sources if r != root], group)
    for piece, landing in zip(pieces, landings, strict=True):
        if not piece.is_contiguous():
            piece.detach().copy_(landing)


def scatter(
    tensor: Tensor,
    scatter_list: list[Tensor] | None = None,
    src: int | None = None,
    group: ProcessGroup | None = None,
    group_src: int | None = None,
) -> None:
    """Fill everybody's `tensor` with its entry of rank `src`'s `scatter_list`.

    `scatter_list` is given on `src` alone; `src` is 0 unless given. Ranks may have
    different shapes when the list's tensors have them too.
    """
    if src is None and group_src is None:
        src = 0
    root = root_of("scatter", "src", src, group_src, group)
    pieces = _list_on_root("scatter", "scatter_list", scatter_list, root, tensor, group)
    if pieces is None:
        landing = tensor.detach().contiguous()
        exchange_all([], [(landing, root)], group)
        if not tensor.is_contiguous():
            tensor.detach().copy_(landing)
        return
    tensor.detach().copy_(pieces[root].detach())
    outgoing = [(piece.detach().contiguous(), r) for r, piece in enumerate(pieces)]
    exchange_all([(t, r) for t, r in outgoing if r != root], [], group)


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None
) -> None:
    """Everybody's `tensor_list` becomes the list of all `tensor`s, in rank order.

    Ranks may have different shapes when the lists' tensors have them too. A ring: what
    a rank received in one step it passes on in the next.
    """
    rank, size = rank_and_size(group)
    tensor_list = list(tensor_list or ())
    shapes = [shape_of(t) for t in tensor_list]
    check_call(
        "all_gather", group, tensor, *tensor_list,
        compare=[shapes], written=tensor_list,
        rules=[
            (len(shapes) == size, f"{len(shapes)} output tensors for {size} ranks"),
            (
                shapes[rank : rank + 1] == [shape_of(tensor)],
                f"rank {rank}: outputs {shapes}, input {shape_of(tensor)}",
            ),
        ],
    )  # fmt: skip
    landings = [t.detach().contiguous() for t in tensor_list]
    landings[rank].copy_(tensor.detach())
    for step in range(size - 1):
        send_piece, recv_piece = (rank - step) % size, (rank - 1 - step) % size
        ring_shift(landings[send_piece], landings[recv_piece], group=group)
    for output, landing in zip(tensor_list, landings, strict=True):
        if not output.is_contiguous():
            output.detach().copy_(landing)


def all_gather_into_tensor(
    output_tensor: Tensor, input_tensor: Tensor, group: ProcessGroup | None = None
) -> None:
    """`output_tensor` becomes all `input_tensor`s, concatenated or stacked."""
    ring_all_gather(output_tensor, input_tensor, group)


def reduce_scatter(
    output: Tensor,
    input_list: list[Tensor],
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Rank r's `output` becomes the reduction of everybody's `input_list[r]`.

    Ranks may have different shapes when the lists' tensors have them too.
    """
    rank, size = rank_and_size(group)
    input_list = list(input_list or ())
    shapes = [shape_of(t) for t in input_list]
    check_call(
        "reduce_scatter", group, output, *input_list, op=op, compare=[shapes],
        rules=[
            (len(shapes) == size, f"{len(shapes)} input tensors for {size} ranks"),
            (
                shapes[rank : rank + 1] == [shape_of(output)],
                f"rank {rank}: inputs {shapes}, output {shape_of(output)}",
            ),
        ],
    )  # fmt: skip
    partial = input_list[(rank - 1) % size].detach().contiguous()
    for step in range(size - 1):
        mine = input_list[(rank - 2 - step) % size].detach()
        incoming = torch.empty_like(mine, memory_format=torch.contiguous_format)
        ring_shift(partial, incoming, group=group)
        fold_into(incoming, mine, op)
        partial = incoming
    output.detach().copy_(partial)
    divide_if_average(output.detach(), op, size)


def reduce_scatter_tensor(
    output: Tensor,
    input: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Rank r's `output` becomes the reduction of everybody's chunk r of `input`."""
    ring_reduce_scatter(output, input, op, group)


all_gather_single = all_gather_into_tensor  # torch 2.13's names
reduce_scatter_single = reduce_scatter_tensor


def barrier(group: ProcessGroup | None = None) -> None:
    """Return when every rank has called it (dissemination barrier: ceil(log2 N) steps).

    In step k a rank hears from the one 2^k behind it, which by then has heard from all
    2^k - 1 before that one; after the last step everyone has heard from everyone.
    """
    _, size = check_call("barrier", group)
    token, landing = torch.zeros(
        2, 1, dtype=torch.float32, device=message_device(group)
    )
    distance = 1
    while distance < size:
        ring_shift(token, landing, shift=distance, group=group)
        distance *= 2
    landing.cpu()  # a GPU has queued the messages; this waits until they are here


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
        rank_and_size(group)  # who is not a member cannot tell the members
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
