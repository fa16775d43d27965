"""Attention that drops probabilities, where each rank holds some of the heads.

Torch's fused attention draws its mask from the generator of the device. In a
tensor-parallel group all generators have the same state, so head h of every rank would
get the same mask: fused attention must run within `rank_rng`. The other form holds the
probabilities, [B, N / t, S, S], and its mask is the whole model's for any t.

Shapes: B batch, N query heads, K key/value heads, S sequence, D head size, t ranks.
"""

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.batch_rows import FIRST_ROW
from xtrain.tensor_parallel.attention_mask import (
    attention_mask,
    scaled_dot_product_attention,
)
from xtrain.tensor_parallel.dropout import (
    check_probability,
    draw_key,
    drop,
    parallel_dropout,
    rank_rng,
)


class DropoutAttention(nn.Module):
    """`scaled_dot_product_attention` with dropout while training.

    Use: `ParallelAttention(..., attention=DropoutAttention(0.1))`.

    Args:
        p: the probability that an attention probability becomes 0.
        fused: torch's own kernel, with other masks for another number of ranks.
        split_heads: each rank holds its slice of the heads; otherwise all of them.
        alone: no other rank has to drop the same: nothing is compared between ranks.
    """

    def __init__(
        self,
        p: float,
        *,
        fused: bool = False,
        split_heads: bool = True,
        alone: bool = False,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        check_probability(p)
        if fused and not split_heads:
            raise ValueError(
                "fused=True is for split heads: on whole ones all ranks must drop "
                "the same, and torch's own dropout_p does"
            )
        self.p, self.fused, self.alone, self.group = p, fused, alone, group
        self.split_dim = 1 if split_heads else None

    def forward(
        self,
        q_BNSD: Tensor,
        k_BKSD: Tensor,
        v_BKSD: Tensor,
        is_causal: bool = False,
        enable_gqa: bool = False,
        **limits: Any,
    ) -> Tensor:
        """`limits` are a window and documents, as of `attention_mask`."""
        dropping = self.training and self.p > 0
        if self.fused or not dropping:
            with rank_rng(q_BNSD.device, self.group) if dropping else nullcontext():
                return scaled_dot_product_attention(
                    q_BNSD,
                    k_BKSD,
                    v_BKSD,
                    dropout_p=self.p if dropping else 0.0,
                    is_causal=is_causal,
                    enable_gqa=enable_gqa,
                    **limits,
                )
        queries_per_key = q_BNSD.shape[1] // k_BKSD.shape[1]
        k_BNSD = k_BKSD.repeat_interleave(queries_per_key, 1)
        v_BNSD = v_BKSD.repeat_interleave(queries_per_key, 1)
        scores_BNSS = q_BNSD @ k_BNSD.transpose(-1, -2) * q_BNSD.shape[-1] ** -0.5
        wide = torch.promote_types(q_BNSD.dtype, torch.float32)
        if is_causal or limits:
            seen = attention_mask(q_BNSD.shape[2], **limits, device=q_BNSD.device)
            least = torch.finfo(wide).min  # not -inf: padding sees nothing at all
            scores_BNSS = scores_BNSS.to(wide).masked_fill(~seen, least)
            probabilities_BNSS = scores_BNSS.softmax(-1).masked_fill(~seen, 0.0)
        else:
            probabilities_BNSS = scores_BNSS.softmax(-1, dtype=wide)
        return self._dropped(probabilities_BNSS.to(q_BNSD.dtype)) @ v_BNSD

    def _dropped(self, x_BNSS: Tensor) -> Tensor:
        if self.alone:
            shape, start = x_BNSS.shape, [FIRST_ROW.get(), 0, 0, 0]
            return drop(x_BNSS, self.p, draw_key(), shape, start)
        return parallel_dropout(x_BNSS, self.p, True, self.split_dim, self.group)
