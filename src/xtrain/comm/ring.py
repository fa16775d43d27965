"""Ring collectives: every rank talks to its two neighbours only.

    rank 0 -> rank 1 -> rank 2 -> ... -> rank N-1 -> rank 0

The tensor is cut into N chunks, and chunk c starts at rank c+1. Reduce-scatter: each
rank passes a partial sum on and adds what arrives; after N-1 steps rank r holds the
finished chunk r. All-gather: the finished chunks are passed on in the same way and
kept. All-reduce is the one after the other.

Every step uses every link at once, so a rank waits for its neighbour only. For a
tensor of M bytes each rank sends (N-1)/N M in reduce-scatter and in all-gather, so
2(N-1)/N M in all-reduce: the least any algorithm can do (Patarasuk and Yuan, Bandwidth
Optimal All-reduce Algorithms for Clusters of Workstations, 2009). The price is latency:
2(N-1) steps.

All-reduce works in place, on chunks of one tensor: `reduce_scatter_chunks`, then
`all_gather_chunks`. These leave the checks to the collective that calls them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.calls import check_call
from xtrain.comm.checks import holds_all, rank_and_size
from xtrain.comm.reduce_op import divide_if_average, fold_into
from xtrain.comm.ring_pass import RingPass


def ring_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place, on every rank. Any shape, any size.

    Each rank sends 2(N-1)/N of the tensor in 2(N-1) steps.
    """
    _, size = check_call("ring_all_reduce", group, tensor, op=op)
    flat = tensor.detach().contiguous().view(-1)
    chunks = flat.tensor_split(size)
    reduce_scatter_chunks(chunks, op, group)
    all_gather_chunks(chunks, group)
    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def reduce_scatter_chunks(
    chunks: Sequence[Tensor], op: ReduceOp.RedOpType, group: ProcessGroup | None = None
) -> None:
    """Reduce all ranks' chunk r into rank r's, in place; the first is the longest.

    The other chunks hold partial results afterwards.
    """
    rank, size = rank_and_size(group)
    incoming = torch.empty_like(chunks[0])
    ring = RingPass(group)
    for step in range(size - 1):
        partial = chunks[(rank - 1 - step) % size]
        mine = chunks[(rank - 2 - step) % size]
        ring.start(partial, incoming[: mine.numel()])
        ring.wait_recv()
        fold_into(mine, incoming[: mine.numel()], op)
    divide_if_average(chunks[rank], op, size)
    ring.wait()  # what was sent may be overwritten now


def all_gather_chunks(
    chunks: Sequence[Tensor], group: ProcessGroup | None = None
) -> None:
    """Copy rank r's chunk r into every other's, in place.

    Chunks arrive in their final places, so all receives are posted first.
    """
    rank, size = rank_and_size(group)
    arriving = [chunks[(rank - 1 - step) % size] for step in range(size - 1)]
    ring = RingPass(group)
    ring.post_recvs(arriving)
    for step, chunk in enumerate(arriving):
        ring.start(chunks[(rank - step) % size], chunk)
        ring.wait_recv()
    ring.wait()


def ring_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Rank r's `output` becomes the reduction of all ranks' chunk r of `input`.

    `input` holds N chunks of `output`'s size, one after the other or stacked, and is
    not changed. Each rank sends (N-1)/N of `input` in N-1 steps.
    """
    rules = [holds_all(input, output, group)]
    rank, size = check_call(
        "ring_reduce_scatter", group, output, input, op=op, rules=rules
    )
    chunks = input.detach().contiguous().view(size, -1)
    result = output.detach()
    inside = output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
    last = (  # the buffer of the last step
        torch.empty_like(chunks[0])
        if inside or not output.is_contiguous()
        else result.view(-1)
    )
    buffers = last, torch.empty_like(last)
    partial = chunks[(rank - 1) % size]
    ring = RingPass(group)
    for step in range(size - 1):
        incoming = buffers[(size - step) % 2]
        ring.wait()  # the step before this one sent from that buffer
        ring.start(partial, incoming)
        ring.wait_recv()
        fold_into(incoming, chunks[(rank - 2 - step) % size], op)
        partial = incoming
    ring.wait()
    if partial.data_ptr() != result.data_ptr():
        result.copy_(partial.view(output.shape))
    divide_if_average(result, op, size)


def ring_all_gather(
    output: Tensor, input: Tensor, group: ProcessGroup | None = None
) -> None:
    """Every rank's `output` becomes all the `input`s, one after the other or stacked.

    Each rank sends (N-1)/N of `output` in N-1 steps.
    """
    rules = [holds_all(output, input, group)]
    rank, size = check_call(
        "ring_all_gather", group, input, output, rules=rules, written=[output]
    )
    gathered = output.detach().contiguous()
    chunks = gathered.view(size, -1)
    passed_on = input.detach().contiguous().view(-1)
    arriving = [chunks[(rank - 1 - step) % size] for step in range(size - 1)]
    ring = RingPass(group)
    ring.post_recvs(arriving)
    for chunk in arriving:
        ring.start(passed_on, chunk)
        ring.wait_recv()
        passed_on = chunk
    chunks[rank].copy_(input.detach().reshape(-1))  # while the last send leaves
    ring.wait()
    if not output.is_contiguous():
        output.detach().copy_(gathered)
