"""The modules a decoder is made of: whole, or cut over groups of ranks.

group of       cuts                           made by
tensor         everything but norms, router   TensorParallelModules
expert         the experts of a layer         both
"""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.model.config import XtrainConfig
from xtrain.model.context_dropout import ContextDropout
from xtrain.model.layer import Attention, DecoderLayer, OverlappedDecoderLayer, SwiGLU
from xtrain.model.moe import make_moe
from xtrain.pipeline_parallel.recompute import checkpoint
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    DropoutAttention,
    ParallelAttention,
    ParallelRMSNorm,
    ParallelSwiGLU,
    VocabParallelEmbedding,
)
from xtrain.tensor_parallel.attention_mask import scaled_dot_product_attention
from xtrain.tensor_parallel.norm import RMSNorm


class Recomputed(nn.Module):
    """A function or module that backward computes again, keeping its inputs alone."""

    def __init__(self, inner: Callable[..., Tensor]):
        super().__init__()
        self.inner = inner

    def forward(self, *args: Any, **options: Any) -> Tensor:
        return checkpoint(self.inner, *args, **options)


class PlainModules:
    """Every module whole, on one device.

    Args:
        expert: the ranks over which the experts of a layer lie, or None.

    Attributes:
        recomputes_attention: backward computes scores and probabilities again.
        once_a_rank: tokens travel once to each rank with experts of theirs.
        context: how many ranks the given attention is of, or None.
    """

    recomputes_attention = False
    once_a_rank = False
    context: int | None = None

    def __init__(
        self,
        config: XtrainConfig,
        attention: Callable[..., Tensor],
        expert: ProcessGroup | None = None,
    ):
        if attention is F.scaled_dot_product_attention:
            attention = scaled_dot_product_attention
        self.config, self.given_attention = config, attention
        self.expert = expert
        self.dropping: dict[str, Any] = {"alone": True}

    def embedding(self) -> nn.Module:
        return nn.Embedding(self.config.vocab_rows, self.config.hidden_size)

    def norm(self) -> nn.Module:
        return RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def attention(self, layer: int = 0) -> nn.Module:
        """Of the layer with this number."""
        window = self.config.window_of(layer)
        return Attention(self.config, self.attention_function(), window)

    def attention_function(self) -> Callable[..., Tensor]:
        """What a layer calls; one that drops is a module of the layer."""
        p, attends = self.config.attention_dropout, self.given_attention
        if p and self.context is not None:
            group = self.dropping.get("group")
            attends = ContextDropout(p, attends, self.context, group)
        elif p:
            attends = DropoutAttention(p, **self.dropping)
        return Recomputed(attends) if self.recomputes_attention else attends

    def mlp(self, layer: int = 0) -> nn.Module:
        """Of the layer with this number."""
        if self.config.is_moe(layer):
            return make_moe(self.config, self.expert, once_a_rank=self.once_a_rank)
        return SwiGLU(self.config)

    def layer(self, number: int = 0) -> DecoderLayer:
        """The layer of the model with this number."""
        kind = OverlappedDecoderLayer if self.overlaps(number) else DecoderLayer
        attention, mlp = self.attention(number), self.mlp(number)
        return kind(self.norm(), attention, self.norm(), mlp)

    def overlaps(self, layer: int) -> bool:
        """Whether a layer sends to experts on other ranks, in chunks if it can."""
        far = self.expert is not None and self.expert.size() > 1
        return far and self.config.is_moe(layer) and not self.once_a_rank

    def head(self) -> nn.Module:
        return nn.Linear(self.config.hidden_size, self.config.vocab_rows, bias=False)


class TensorParallelModules(PlainModules):
    """Every module cut over the ranks of `group`; norms are whole on each.

    Gradients of norms and of shared key heads are left to `sync_gradients` to sum.
    """

    def __init__(
        self,
        config: XtrainConfig,
        attention: Callable[..., Tensor],
        sequence_parallel: bool,
        group: ProcessGroup,
        expert: ProcessGroup | None = None,
    ):
        super().__init__(config, attention, expert)
        self.group, self.dropping = group, {"group": group}
        cut: dict[str, Any] = {"sequence_parallel": sequence_parallel, "group": group}
        self.cut = cut

    def embedding(self) -> nn.Module:
        sizes = self.config.vocab_rows, self.config.hidden_size
        return VocabParallelEmbedding(*sizes, **self.cut)

    def norm(self) -> nn.Module:
        config = self.config
        sizes = config.hidden_size, config.rms_norm_eps
        return ParallelRMSNorm(*sizes, sum_gradients=False, **self.cut)

    def attention(self, layer: int = 0) -> nn.Module:
        config = self.config
        return ParallelAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            attention=self.attention_function(),
            qkv_bias=config.qkv_bias,
            qk_norm_eps=config.rms_norm_eps if config.qk_norm else None,
            window=config.window_of(layer),
            sum_gradients=False,
            **self.cut,
        )

    def mlp(self, layer: int = 0) -> nn.Module:
        if self.config.is_moe(layer):
            cut = self.group, self.cut["sequence_parallel"], self.once_a_rank
            return make_moe(self.config, self.expert, *cut)
        sizes = self.config.hidden_size, self.config.intermediate_size
        return ParallelSwiGLU(*sizes, **self.cut)

    def overlaps(self, layer: int) -> bool:
        # chunks take tokens as the layer gets them, which here are a slice
        return not self.cut["sequence_parallel"] and super().overlaps(layer)

    def head(self) -> nn.Module:
        sizes = self.config.hidden_size, self.config.vocab_rows
        return ColumnParallelLinear(*sizes, bias=False, **self.cut)
