"""Reduce-scatter and all-gather in a single round: every rank writes to every other.

    all-gather         rank r sends its piece to all others, and receives theirs where
                       they belong
    reduce-scatter     rank r sends every other rank that one's chunk, receives N - 1
                       versions of its own, and adds them up

The bytes are those of a ring, (N-1)/N of the whole tensor a rank, in one step instead
of N - 1. A ring is kinder to a network, as ranks talk to neighbours only; this
is kinder to computation meanwhile: all messages are issued at once and nothing more
has to be done until they are there. So both return a `Work` to wait for, and the
bytes travel while backward goes on. Sums are in rank order, those of fp16 and bf16 in
fp32.
"""

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from xtrain.comm.calls import check_call
from xtrain.comm.checks import are_contiguous, holds_all
from xtrain.comm.p2p import post_all
from xtrain.comm.reduce_op import reduce_into
from xtrain.comm.transport_errors import naming_peers
from xtrain.comm.work import Work

TAG = 3  # the program's own messages, under way meanwhile, have tag 0 by default


def direct_all_gather(
    output: Tensor, input: Tensor, group: ProcessGroup | None = None
) -> Work:
    """Begin to put all the `input`s, one after the other, into every `output`.

    Both contiguous. Each rank sends (N-1)/N of `output` in one step.
    """
    rank, size = check_call(
        "direct_all_gather",
        group,
        input,
        output,
        written=[output],
        rules=[holds_all(output, input, group), are_contiguous(output, input)],
    )
    chunks, mine = output.detach().view(size, -1), input.detach().view(-1)
    others = [peer for peer in range(size) if peer != rank]
    works = post_all(
        [(mine, peer) for peer in others],
        [(chunks[peer], peer) for peer in others],
        group,
        TAG,
    )
    works = naming_peers(works, "direct_all_gather", others * 2, group)
    chunks[rank].copy_(mine)  # while the messages travel
    return Work(works, keep=(output, input))


def direct_reduce_scatter(
    output: Tensor,
    input: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> Work:
    """Begin to reduce all ranks' chunk r of `input` into rank r's `output`.

    Both contiguous. Each rank sends (N-1)/N of `input` in one step, and takes as much
    memory to receive into.
    """
    rank, size = check_call(
        "direct_reduce_scatter",
        group,
        output,
        input,
        op=op,
        rules=[holds_all(input, output, group), are_contiguous(output, input)],
    )
    chunks, total = input.detach().view(size, -1), output.detach().view(-1)
    others = [peer for peer in range(size) if peer != rank]
    versions = {peer: torch.empty_like(total) for peer in others}
    works = post_all(
        [(chunks[peer], peer) for peer in others],
        [(versions[peer], peer) for peer in others],
        group,
        TAG,
    )
    works = naming_peers(works, "direct_reduce_scatter", others * 2, group)

    def add_up() -> None:
        versions[rank] = chunks[rank]
        reduce_into(total, [versions[r] for r in range(size)], op)

    return Work(works, add_up)


def direct_all_reduce(
    tensor: Tensor,
    op: ReduceOp.RedOpType = ReduceOp.SUM,
    group: ProcessGroup | None = None,
) -> Work:
    """Begin to reduce `tensor` over all ranks, in place: the first half of two.

    The second half, in which every rank gets all results, runs in `wait`. Needs a
    contiguous tensor. Each rank sends 2(N-1)/N of it, padded to N equal chunks.
    """
    rules = [are_contiguous(tensor)]
    _, size = check_call("direct_all_reduce", group, tensor, op=op, rules=rules)
    whole = tensor.detach().view(-1)
    missing = -whole.numel() % size
    if missing:
        whole = torch.cat([whole, whole.new_zeros(missing)])
    sums = torch.empty_like(whole[: whole.numel() // size])
    halfway = direct_reduce_scatter(sums, whole, op, group)

    def gather() -> None:
        direct_all_gather(whole, sums, group).wait()
        if missing:
            tensor.detach().view(-1).copy_(whole[:-missing])

    return Work([halfway], gather)
