"""A Llama-style decoder on one device.

    tokens [B, S] -> embedding -> layers x (attention, SwiGLU) -> norm -> head -> logits

Each half of a layer has a norm before it and a residual around it. Modules are named
as in Hugging Face's Llama, so that its checkpoints map one to one. There are no
buffers, so no wrapper has to broadcast any.

Source: Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from xtrain.model.attention import Attention
from xtrain.model.checks import check_inputs, check_mesh
from xtrain.model.config import XtrainConfig
from xtrain.model.initialize import full_weight
from xtrain.model.loss import mean_cross_entropy
from xtrain.model.mlp import SwiGLU


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each with a norm before and a residual around it."""

    def __init__(
        self,
        config: XtrainConfig,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
    ):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = nn.RMSNorm(hidden, eps)
        self.self_attn = Attention(config, attention)
        self.post_attention_layernorm = nn.RMSNorm(hidden, eps)
        self.mlp = SwiGLU(config)

    def forward(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), positions)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


class XtrainModel(nn.Module):
    """The whole decoder: embedding, layers, norm and head.

    On the meta device it takes no memory; `to_empty` and then `reset_parameters` (or a
    checkpoint) make it the model that it would have been at once.

    Args:
        mesh: None, or a mesh whose axes all have size 1.
        attention: what each layer calls in place of torch's.
    """

    def __init__(
        self,
        config: XtrainConfig,
        mesh: DeviceMesh | None = None,
        *,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_mesh(mesh)
        self.config = config
        hidden, vocabulary = config.hidden_size, config.vocab_size
        with torch.device(device or torch.get_default_device()):
            self.embed_tokens = nn.Embedding(vocabulary, hidden)
            self.layers = nn.ModuleList(
                DecoderLayer(config, attention) for _ in range(config.num_hidden_layers)
            )
            self.norm = nn.RMSNorm(hidden, config.rms_norm_eps)
            self.lm_head = nn.Linear(hidden, vocabulary, bias=False)
        self.to(dtype or torch.get_default_dtype())
        self._tie()
        if not self.norm.weight.is_meta:
            self.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Logits [B, S, V], or the mean loss over labels other than -100.

        Args:
            tokens: ids, [B, S].
            labels: [B, S], each the token that should follow; the caller shifts them.
            positions: [S] or [B, S]; 0, 1, 2, ... unless given.
        """
        check_inputs(tokens, labels, positions)
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x_BSH = self.embed_tokens(tokens)
        for layer in self.layers:
            x_BSH = layer(x_BSH, positions)
        logits_BSV = self.lm_head(self.norm(x_BSH))
        return logits_BSV if labels is None else mean_cross_entropy(logits_BSV, labels)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The call with labels: `self(...)`, so that hooks of wrappers run."""
        return self(tokens, labels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter the weights that its name stands for."""
        seed, std = self.config.seed, self.config.initializer_range
        for name, parameter in self.named_parameters():
            parameter.copy_(full_weight(name, parameter.shape, seed, std))

    def to_empty(self, **options: Any) -> Self:
        """As torch's, but a tied head stays tied."""
        super().to_empty(**options)
        self._tie()
        return self

    def _tie(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
