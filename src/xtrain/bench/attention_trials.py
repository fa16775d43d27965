"""Attention over a sequence as a trial: forward and backward, the same for everyone.

    one process   rank 0 has the whole sequence, the others wait
    on ranks      every rank has its tokens, as `shard_sequence` cuts them

A trial runs its step once when it is made and joins what all ranks got. That must be
what one process computes in float64 (`in_float64`): the output and the gradients of q,
k and v. A step makes its tensors anew, so what is timed is what was checked.

Shapes: q, k, v and the gradient of the output are [1, HEADS, tokens, HEAD_DIM].
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.bench.race import Case, Trial
from xtrain.bench.training_trials import group_on
from xtrain.context_parallel import shard_sequence, unshard_sequence
from xtrain.context_parallel.block_attention import BlockAttention
from xtrain.context_parallel.online_softmax import State, merge

HEADS, HEAD_DIM = 8, 64
TOKEN_BYTES = HEADS * HEAD_DIM * 4
TOLERANCE = 5e-5  # of fp32 against float64

Attend = Callable[..., Tensor]
"""(q, k, v, group=...) -> out, of this rank's tokens."""


def tokens_of(case: Case) -> int:
    """As many as `case.size` bytes of queries are; at least two for each rank."""
    return max(case.size // TOKEN_BYTES, 2 * case.ranks)


def size_of(tokens: int) -> int:
    """Bytes of the queries of so many tokens, in fp32."""
    return tokens * TOKEN_BYTES


def tensors_of(case: Case) -> list[Tensor]:
    """q, k, v and the gradient of the output: all tokens, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    shape = 4, 1, HEADS, tokens_of(case), HEAD_DIM
    return list(torch.randn(shape, generator=generator).to(case.device))


def in_float64(causal: bool, case: Case) -> list[Tensor]:
    """Output and gradients of one process, to which every contestant is compared."""
    return step_of(sdpa, [t.double() for t in tensors_of(case)], None, causal)()


def step_of(
    attend: Attend, tensors: list[Tensor], group: ProcessGroup | None, *options: Any
) -> Callable[[], list[Tensor]]:
    """Forward and backward: out, dq, dk, dv."""
    *inputs, grad_out = (t.detach().contiguous() for t in tensors)
    for tensor in inputs:
        tensor.requires_grad_()

    def step() -> list[Tensor]:
        out = attend(*inputs, *options, group=group)
        return [out.detach(), *torch.autograd.grad(out, inputs, grad_out)]

    return step


def one_process_trial(attend: Attend, case: Case) -> Trial:
    """The whole sequence on rank 0; every rank has made it once, to be checked."""
    step = step_of(attend, tensors_of(case), None)
    return Trial(step if dist.get_rank() == 0 else nothing, step())


def nothing() -> None:
    """The step of the other ranks."""


def cut_trial(attend: Attend, balance: str, backend: str, case: Case) -> Trial:
    """The sequence cut over all ranks."""
    group = group_on(backend)
    mine = [shard_sequence(t, 2, balance, group) for t in tensors_of(case)]
    step = step_of(attend, mine, group)
    return Trial(step, [unshard_sequence(t, 2, balance, group) for t in step()])


# ------------------------------------------------------------------ one process


def sdpa(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, group: ProcessGroup | None = None
) -> Tensor:
    """torch's own attention."""
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def naive(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, group: ProcessGroup | None = None
) -> Tensor:
    """The formula: all scores, their softmax, and the average of the values."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    if causal:
        later = scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return scores.softmax(-1) @ v


class InBlocks(torch.autograd.Function):
    """The blocks of a ring of PARTS ranks, contiguous, all computed by one process."""

    PARTS = 2

    @staticmethod
    def forward(
        ctx: Any, attention: BlockAttention, causal: bool, *qkv: Tensor
    ) -> Tensor:
        q, k, v = (t.chunk(InBlocks.PARTS, 2) for t in qkv)
        ctx.scale = qkv[0].shape[-1] ** -0.5
        states = []
        for i, queries in enumerate(q):
            state: State | None = None
            for j in range(i + 1 if causal else len(k)):
                block = attention.forward(
                    queries, k[j], v[j], causal and i == j, ctx.scale
                )
                state = merge(state, block)
            assert state is not None
            states.append(state)
        out, lse = (torch.cat(parts, 2) for parts in zip(*states, strict=True))
        ctx.attention, ctx.causal = attention, causal
        ctx.save_for_backward(*qkv, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        saved = (t.chunk(InBlocks.PARTS, 2) for t in ctx.saved_tensors)
        q, k, v, out, lse = saved
        dq, dk, dv = ([torch.zeros_like(t) for t in each] for each in (q, k, v))
        for i, grad in enumerate(grad_out.chunk(InBlocks.PARTS, 2)):
            for j in range(i + 1 if ctx.causal else len(k)):
                parts = ctx.attention.backward(
                    grad, q[i], k[j], v[j], out[i], lse[i], ctx.causal and i == j,
                    ctx.scale,
                )  # fmt: skip
                for total, part in zip((dq[i], dk[j], dv[j]), parts, strict=True):
                    total += part
        return None, None, *(torch.cat(parts, 2) for parts in (dq, dk, dv))


def in_blocks(
    attention: BlockAttention,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Attention by blocks, each computed with `attention`."""
    return InBlocks.apply(attention, causal, q, k, v)
