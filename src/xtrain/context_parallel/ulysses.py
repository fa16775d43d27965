"""Ulysses: swap a cut sequence for cut heads, attend as on one device, swap back.

    [B, H, S/N, D]  -- all-to-all -->  [B, H/N, S, D]  attention of whole heads
    [B, H, S/N, D]  <-- all-to-all --  [B, H/N, S, D]

Four all-to-alls a layer (q, k, v and the output) send (N-1)/N of what a rank holds
each, which falls with the number of ranks; it is limited by the number of heads. Fewer
key heads than ranks are repeated first, and their gradients add up.

Source: Jacobs et al., DeepSpeed Ulysses, 2023.

Shapes: B batch, H heads, S whole sequence, D head dim, N ranks.
"""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autocast import cast_by_autocast
from xtrain.comm.autograd import gather
from xtrain.comm.checks import Rule, rank_and_size
from xtrain.comm.collective_choice import TORCH
from xtrain.context_parallel.checks import check_attention
from xtrain.context_parallel.planned import mask_of_call
from xtrain.context_parallel.running_attention import masked_attention
from xtrain.context_parallel.sequence_mask import Dropout, SequenceMask


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = True,
    scale: float | None = None,
    group: ProcessGroup | None = None,
    *,
    window: int | None = None,
    documents: Tensor | None = None,
    mask: SequenceMask | None = None,
    dropout: Dropout | None = None,
) -> Tensor:
    """Exact attention over the sequences of all ranks, which hold runs of it.

    Args:
        q: [B, H, S/N, D], H a multiple of N.
        k, v: [B, G, S/N, D].
        window, documents, mask, dropout: as in `ring_attention`.

    Raises:
        ValueError: on every rank: shapes that do not fit, heads that do not divide.
    """
    q, k, v = cast_by_autocast(q, k, v)
    check_attention(
        "ulysses_attention",
        q, k, v, group, causal=causal, scale=scale, window=window,
        documents=documents, mask=mask, rules=(heads_divide(q, group),),
    )  # fmt: skip
    mask = mask_of_call(q, k, causal, "none", window, documents, group, mask)
    q, k, v = (heads_of_sequence(t, group) for t in (q, *enough_heads(k, v, group)))
    if mask.window is None and mask.documents is None and dropout is None:
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=causal, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    else:
        first = rank_and_size(group)[0] * q.shape[1]
        joined = mask.joined.dropping(dropout, slice(first, first + q.shape[1]))
        out = masked_attention(q, k, v, joined, scale)
    return sequence_of_heads(out, group)


def documents_of_row(documents: Tensor, group: ProcessGroup | None) -> Tensor:
    """The ids of the sequence that the ranks hold runs of: [B, S/N] -> [B, S]."""
    return gather(documents.to(torch.int64), 1, group)


def heads_divide(q: Tensor, group: ProcessGroup | None) -> Rule:
    """A rule: each rank gets whole heads."""
    _, size = rank_and_size(group)
    shaped = isinstance(q, Tensor) and q.dim() == 4  # or else it is refused for that
    heads = q.shape[1] if shaped else 0
    return heads % size == 0, (
        f"{heads} heads on {size} ranks: each needs the same number of whole heads"
    )


def enough_heads(
    k: Tensor, v: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, ...]:
    """Keys and values, repeated where there are not enough heads for all ranks."""
    _, size = rank_and_size(group)
    copies = math.lcm(k.shape[1], size) // k.shape[1]
    return (
        (k, v) if copies == 1 else tuple(t.repeat_interleave(copies, 1) for t in (k, v))
    )


def heads_of_sequence(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[B, H, S/N, D] -> [B, H/N, S, D]; backward is the way back."""
    return _HeadsOfSequence.apply(x, group)


def sequence_of_heads(x: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """[B, H/N, S, D] -> [B, H, S/N, D]; backward is the way back."""
    return _SequenceOfHeads.apply(x, group)


class _HeadsOfSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return swap(x, 1, 2, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sequence_of_heads(grad, ctx.group), None


class _SequenceOfHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup | None) -> Tensor:
        ctx.group = group
        return swap(x, 2, 1, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return heads_of_sequence(grad, ctx.group), None


def swap(x: Tensor, cut: int, joined: int, group: ProcessGroup | None) -> Tensor:
    """Cut dim `cut` into a part for each rank, and join what comes along `joined`."""
    _, size = rank_and_size(group)
    sent = torch.stack(x.chunk(size, cut)).contiguous()  # views may look channels-last
    received = torch.empty_like(sent)
    TORCH.all_to_all_single(received, sent, group=group).wait()
    return torch.cat(received.unbind(), joined)
