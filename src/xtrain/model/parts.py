"""The modules a decoder is made of: whole ones, or ones cut over groups of ranks.

group of       cuts                           made by
tensor         everything but norms, router   CutParts
expert         the experts of a layer         either
"""

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.model.attention import Attention
from xtrain.model.config import XtrainConfig
from xtrain.model.mlp import SwiGLU
from xtrain.model.moe import make_moe
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelRMSNorm,
    ParallelSwiGLU,
    VocabParallelEmbedding,
)


class WholeParts:
    """Every module whole, on one device.

    Args:
        expert: the ranks over which the experts of a layer lie, if over any.
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

    def sends_copies(self, layer: int) -> bool:
        """Whether a layer's only messages are those to experts on other ranks."""
        expert = self.expert
        return self.config.is_moe(layer) and expert is not None and expert.size() > 1

    def head(self) -> nn.Module:
        return nn.Linear(self.config.hidden_size, self.config.vocab_size, bias=False)


class CutParts(WholeParts):
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
        self.sequence_parallel, self.group = sequence_parallel, group

    def embedding(self) -> nn.Module:
        return VocabParallelEmbedding(
            self.config.vocab_size,
            self.config.hidden_size,
            sequence_parallel=self.sequence_parallel,
            group=self.group,
        )

    def norm(self) -> nn.Module:
        return ParallelRMSNorm(
            self.config.hidden_size,
            self.config.rms_norm_eps,
            sequence_parallel=self.sequence_parallel,
            group=self.group,
        )

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
            sequence_parallel=self.sequence_parallel,
            group=self.group,
        )

    def mlp(self, layer: int = 0) -> nn.Module:
        if self.config.is_moe(layer):
            return make_moe(
                self.config, self.expert, self.group, self.sequence_parallel
            )
        return ParallelSwiGLU(
            self.config.hidden_size,
            self.config.intermediate_size,
            sequence_parallel=self.sequence_parallel,
            group=self.group,
        )

    def sends_copies(self, layer: int) -> bool:
        return False  # every half of a layer sends

    def head(self) -> nn.Module:
        return ColumnParallelLinear(
            self.config.hidden_size,
            self.config.vocab_size,
            bias=False,
            sequence_parallel=self.sequence_parallel,
            group=self.group,
        )
