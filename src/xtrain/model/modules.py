"""The modules a decoder is made of: whole, or cut over groups of ranks.

group of       cuts                           made by
tensor         everything but norms, router   TensorParallelModules
expert         the experts of a layer         both
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.model.config import XtrainConfig
from xtrain.model.layer import Attention, DecoderLayer, OverlappedDecoderLayer, SwiGLU
from xtrain.model.moe import make_moe
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelRMSNorm,
    ParallelSwiGLU,
    VocabParallelEmbedding,
)


class PlainModules:
    """Every module whole, on one device.

    Args:
        expert: the ranks over which the experts of a layer lie, or None.
    """

    def __init__(
        self,
        config: XtrainConfig,
        attention: Callable[..., Tensor],
        expert: ProcessGroup | None = None,
    ):
        self.config, self.attention_function = config, attention
        self.expert = expert

    def embedding(self) -> nn.Module:
        return nn.Embedding(self.config.vocab_size, self.config.hidden_size)

    def norm(self) -> nn.Module:
        return nn.RMSNorm(self.config.hidden_size, self.config.rms_norm_eps)

    def attention(self) -> nn.Module:
        return Attention(self.config, self.attention_function)

    def mlp(self, layer: int = 0) -> nn.Module:
        """Of the layer with this number."""
        if self.config.is_moe(layer):
            return make_moe(self.config, self.expert)
        return SwiGLU(self.config)

    def layer(self, number: int = 0) -> DecoderLayer:
        """The layer of the model with this number."""
        kind = OverlappedDecoderLayer if self.overlaps(number) else DecoderLayer
        halves = self.norm(), self.attention(), self.norm(), self.mlp(number)
        return kind(*halves)

    def overlaps(self, layer: int) -> bool:
        """Whether a layer's only messages are those to experts on other ranks."""
        expert = self.expert
        return self.config.is_moe(layer) and expert is not None and expert.size() > 1

    def head(self) -> nn.Module:
        return nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)


class TensorParallelModules(PlainModules):
    """Every module cut over the ranks of `group`; norms are whole on each."""

    def __init__(
        self,
        config: XtrainConfig,
        attention: Callable[..., Tensor],
        sequence_parallel: bool,
        group: ProcessGroup,
        expert: ProcessGroup | None = None,
    ):
        super().__init__(config, attention, expert)
        self.group = group
        cut: dict[str, Any] = {"sequence_parallel": sequence_parallel, "group": group}
        self.cut = cut

    def embedding(self) -> nn.Module:
        sizes = self.config.vocab_size, self.config.hidden_size
        return VocabParallelEmbedding(*sizes, **self.cut)

    def norm(self) -> nn.Module:
        config = self.config
        return ParallelRMSNorm(config.hidden_size, config.rms_norm_eps, **self.cut)

    def attention(self) -> nn.Module:
        config = self.config
        return ParallelAttention(
            config.hidden_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
            rope_theta=config.rope_theta,
            rope_scaling=config.rope_scaling,
            attention=self.attention_function,
            **self.cut,
        )

    def mlp(self, layer: int = 0) -> nn.Module:
        if self.config.is_moe(layer):
            cut = self.group, self.cut["sequence_parallel"]
            return make_moe(self.config, self.expert, *cut)
        sizes = self.config.hidden_size, self.config.intermediate_size
        return ParallelSwiGLU(*sizes, **self.cut)

    def overlaps(self, layer: int) -> bool:
        return False  # both halves of a layer send

    def head(self) -> nn.Module:
        sizes = self.config.hidden_size, self.config.vocab_size
        return ColumnParallelLinear(*sizes, bias=False, **self.cut)
