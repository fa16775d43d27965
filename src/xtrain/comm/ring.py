"""Ring collectives: every rank talks to its two neighbours only.

    rank 0 -> rank 1 -> rank 2 -> ... -> rank N-1 -> rank 0

The tensor is cut into N chunks, and chunk c starts its journey behind rank c.
Reduce-scatter: each rank passes a partial sum on and adds what arrives; after N-1 steps
rank r holds the finished chunk r. All-gather: the finished chunks make the same journey
and are kept. All-reduce is the one after the other.

Every step uses every link at once, so nobody waits for anybody but its neighbour. For a
tensor of M bytes each rank sends (N-1)/N M in reduce-scatter and in all-gather, so
2(N-1)/N M in all-reduce: the least any algorithm can do (Patarasuk and Yuan, Bandwidth
Optimal All-reduce Algorithms for Clusters of Workstations, 2009). The price is latency:
2(N-1) steps.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.checks import check_call
from xtrain.comm.p2p import Passing, ring_expect, ring_pass, wait_all
from xtrain.comm.reduce_op import combine, finish


def ring_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Reduce `tensor` over all ranks, in place, on every rank. Any shape, any size.

    Each rank sends 2(N-1)/N of the tensor in 2(N-1) steps.
    """
    rank, size = check_call("ring_all_reduce", group, tensor, op=op)
    flat = tensor.detach().contiguous().view(-1)
    chunks = flat.tensor_split(size)
    incoming = torch.empty_like(chunks[0])
    underway: list[Passing] = []

    for step in range(size - 1):  # reduce-scatter: rank r ends up with chunk r
        partial = chunks[(rank - 1 - step) % size]
        mine = chunks[(rank - 2 - step) % size]
        underway.append(ring_pass(partial, incoming[: mine.numel()], group))
        combine(mine, incoming[: mine.numel()], op)
    finish(chunks[rank], op, size)
    wait_all(underway)  # what has been sent may be overwritten now

    # All-gather: what arrives is final, so it replaces, and nothing has to wait for it.
    arriving = [chunks[(rank - 1 - step) % size] for step in range(size - 1)]
    for step, landing in enumerate(ring_expect(arriving, group)):
        underway.append(ring_pass(chunks[(rank - step) % size], landing, group))
    wait_all(underway)

    if not tensor.is_contiguous():
        tensor.detach().copy_(flat.view(tensor.shape))


def ring_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> None:
    """Rank r's `output` becomes the reduction of everybody's chunk r of `input`.

    `input` holds N chunks of `output`'s size, one after the other or stacked, and is
    not changed. Each rank sends (N-1)/N of `input` in N-1 steps.
    """
    rank, size = check_call("ring_reduce_scatter", group, output, op=op, whole=input)
    chunks = input.detach().contiguous().view(size, -1)
    result = output.detach()
    inside = output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr()
    landing = (
        torch.empty_like(chunks[0])
        if inside or not output.is_contiguous()
        else result.view(-1)
    )
    buffers = landing, torch.empty_like(landing)
    partial = chunks[(rank - 1) % size]
    underway: list[Passing] = []
    for step in range(size - 1):
        incoming = buffers[(size - step) % 2]  # in turn, and the landing comes last
        wait_all(underway)  # the step before this one sent from that buffer
        underway.append(ring_pass(partial, incoming, group))
        combine(incoming, chunks[(rank - 2 - step) % size], op)
        partial = incoming
    wait_all(underway)
    if partial.data_ptr() != result.data_ptr():
        result.copy_(partial.view(output.shape))
    finish(result, op, size)


def ring_all_gather(
    output: Tensor, input: Tensor, group: ProcessGroup | None = None
) -> None:
    """Every rank's `output` becomes all the `input`s, one after the other or stacked.

    Each rank sends (N-1)/N of `output` in N-1 steps.
    """
    rank, size = check_call(
        "ring_all_gather", group, input, whole=output, written=[output]
    )
    gathered = output.detach().contiguous()
    chunks = gathered.view(size, -1)
    passed_on = input.detach().contiguous().view(-1)
    arriving = [chunks[(rank - 1 - step) % size] for step in range(size - 1)]
    underway: list[Passing] = []
    for landing in ring_expect(arriving, group):
        underway.append(ring_pass(passed_on, landing, group))
        passed_on = landing.tensor
    chunks[rank].copy_(input.detach().reshape(-1))  # while the last send leaves
    wait_all(underway)
    if not output.is_contiguous():
        output.detach().copy_(gathered)
