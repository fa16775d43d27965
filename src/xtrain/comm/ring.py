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

from xtrain.comm.checks import check_call, holds_all
from xtrain.comm.reduce_op import divide_if_average, fold_into
from xtrain.comm.ring_steps import post_ring_recvs, ring_send_recv, wait_all
from xtrain.comm.work import Work


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
    in_flight: list[Work] = []

    for step in range(size - 1):  # reduce-scatter: rank r ends up with chunk r
        partial = chunks[(rank - 1 - step) % size]
        mine = chunks[(rank - 2 - step) % size]
        in_flight.append(ring_send_recv(partial, incoming[: mine.numel()], group))
        fold_into(mine, incoming[: mine.numel()], op)
    divide_if_average(chunks[rank], op, size)
    wait_all(in_flight)  # what has been sent may be overwritten now

    # All-gather: what arrives is final, so it replaces, and nothing has to wait for it.
    arriving = [chunks[(rank - 1 - step) % size] for step in range(size - 1)]
    for step, posted in enumerate(post_ring_recvs(arriving, group)):
        in_flight.append(ring_send_recv(chunks[(rank - step) % size], posted, group))
    wait_all(in_flight)

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
    rules = [holds_all(input, output, group)]
    rank, size = check_call(
        "ring_reduce_scatter", group, output, input, op=op, rules=rules
    )
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
    in_flight: list[Work] = []
    for step in range(size - 1):
        incoming = buffers[(size - step) % 2]  # in turn, and the landing comes last
        wait_all(in_flight)  # the step before this one sent from that buffer
        in_flight.append(ring_send_recv(partial, incoming, group))
        fold_into(incoming, chunks[(rank - 2 - step) % size], op)
        partial = incoming
    wait_all(in_flight)
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
    in_flight: list[Work] = []
    for posted in post_ring_recvs(arriving, group):
        in_flight.append(ring_send_recv(passed_on, posted, group))
        passed_on = posted.tensor
    chunks[rank].copy_(input.detach().reshape(-1))  # while the last send leaves
    wait_all(in_flight)
    if not output.is_contiguous():
        output.detach().copy_(gathered)
