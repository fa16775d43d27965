"""The collectives of torch.distributed without a root, from send and receive alone.

Each takes the arguments of torch's function of that name and has the same result.

    all_reduce       all have a part    -> all have the sum       tree or ring, by size
    all_gather       all have a piece   -> all have all pieces    ring
    reduce_scatter   all have a part    -> each has a piece of the sum    ring
    barrier          all have arrived                             dissemination
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.calls import check_call
from xtrain.comm.checks import message_device, rank_and_size, shape_of
from xtrain.comm.p2p import ring_shift
from xtrain.comm.reduce_op import divide_if_average, fold_into
from xtrain.comm.ring import (
    all_gather_chunks,
    reduce_scatter_chunks,
    ring_all_gather,
    ring_reduce_scatter,
)
from xtrain.comm.tree import tree_broadcast, tree_reduce

TREE_MAX_BYTES = 64 * 1024  # up to here fewer steps beat less volume


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


def all_gather(
    tensor_list: list[Tensor], tensor: Tensor, group: ProcessGroup | None = None
) -> None:
    """Every rank's `tensor_list` becomes the list of all `tensor`s, in rank order.

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
    buffers = [t.detach().contiguous() for t in tensor_list]
    buffers[rank].copy_(tensor.detach())
    for step in range(size - 1):
        send_piece, recv_piece = (rank - step) % size, (rank - 1 - step) % size
        ring_shift(buffers[send_piece], buffers[recv_piece], group=group)
    for output, buffer in zip(tensor_list, buffers, strict=True):
        if not output.is_contiguous():
            output.detach().copy_(buffer)


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
    """Rank r's `output` becomes the reduction of all ranks' `input_list[r]`.

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
    """Rank r's `output` becomes the reduction of all ranks' chunk r of `input`."""
    ring_reduce_scatter(output, input, op, group)


all_gather_single = all_gather_into_tensor  # torch 2.13's names
reduce_scatter_single = reduce_scatter_tensor


def barrier(group: ProcessGroup | None = None) -> None:
    """Return when every rank has called it (dissemination barrier: ceil(log2 N) steps).

    In step k a rank receives from the one 2^k before it, which by then depends on the
    2^k - 1 before that one; after the last step every rank depends on every other.
    """
    _, size = check_call("barrier", group)
    token, buffer = torch.zeros(2, 1, dtype=torch.float32, device=message_device(group))
    distance = 1
    while distance < size:
        ring_shift(token, buffer, shift=distance, group=group)
        distance *= 2
    buffer.item()  # a GPU has queued the messages; this waits until they are here
