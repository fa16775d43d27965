"""A Llama-style decoder, whole on one device or cut over the ranks of a mesh.

    tokens [B, S] -> embedding -> layers x (attention, SwiGLU) -> norm -> head -> logits

Each half of a layer has a norm before it and a residual around it. Modules are named
as in Hugging Face's Llama, so that its checkpoints map one to one. There are no
buffers, so no wrapper has to broadcast any.

On a mesh with a "tensor" axis the modules are those of `xtrain.tensor_parallel`; on one
with a "data" axis each data rank brings its own batch, and the loss is the mean over
all of them.

Source: Touvron et al., LLaMA: Open and Efficient Foundation Language Models, 2023.

Shapes: B batch, S sequence, H hidden, V vocabulary.
"""

from collections.abc import Callable, Collection
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import Shard
from xtrain.checkpoint.placement import Placement
from xtrain.comm.autograd import all_gather_split, check_divides
from xtrain.comm.collective_choice import TORCH
from xtrain.comm.wrapper_rules import mark_as_slices
from xtrain.model.checks import check_inputs, check_mesh
from xtrain.model.config import XtrainConfig
from xtrain.model.initialize import full_weight
from xtrain.model.loss import mean_cross_entropy
from xtrain.model.parts import CutParts, WholeParts
from xtrain.model.placement import (
    GRADIENT_AXES,
    axis_group,
    axis_size,
    mesh_group,
    placement_of,
)
from xtrain.zero.clip import clip_sharded_grad_norm_


class DecoderLayer(nn.Module):
    """Attention and SwiGLU, each with a norm before and a residual around it."""

    def __init__(self, parts: WholeParts):
        super().__init__()
        self.input_layernorm = parts.norm()
        self.self_attn = parts.attention()
        self.post_attention_layernorm = parts.norm()
        self.mlp = parts.mlp()

    def forward(self, x_BSH: Tensor, positions: Tensor) -> Tensor:
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), positions)
        return x_BSH + self.mlp(self.post_attention_layernorm(x_BSH))


class XtrainModel(nn.Module):
    """The whole decoder: embedding, layers, norm and head.

    On the meta device it takes no memory; `to_empty` and then `reset_parameters` (or a
    checkpoint) make it the model that it would have been at once.

    Args:
        mesh: axes "data" and "tensor", either or both; others have size 1 so far. Every
            rank of a tensor group passes the same tokens and labels.
        attention: what each layer calls in place of torch's.
        sequence_parallel: keep activations between the layers' matrices cut along the
            sequence over the tensor ranks, whose number must divide its length.

    Raises:
        ValueError: the mesh or a size does not fit, named; before any communication.
    """

    def __init__(
        self,
        config: XtrainConfig,
        mesh: DeviceMesh | None = None,
        *,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        check_mesh(mesh)
        self.config, self.mesh = config, mesh
        self.sequence_parallel = sequence_parallel
        self.data, self.tensor = (axis_group(mesh, axis) for axis in ("data", "tensor"))
        parts = WholeParts(config, attention)
        if self.tensor is not None:
            parts = CutParts(config, attention, sequence_parallel, self.tensor)
        with torch.device("meta"):  # filled below, each weight once
            self.embed_tokens = parts.embedding()
            self.layers = nn.ModuleList(
                DecoderLayer(parts) for _ in range(config.num_hidden_layers)
            )
            self.norm = parts.norm()
            self.lm_head = parts.head()
        self.to(dtype or torch.get_default_dtype())
        self._tie_and_mark()
        device = torch.device(device or torch.get_default_device())
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        *,
        gather_logits: bool = False,
    ) -> Tensor:
        """Logits [B, S, V], or the mean loss over labels other than -100.

        On tensor ranks the logits are this rank's columns of the vocabulary, [B, S,
        V / t]. The loss is the same on every rank of the mesh.

        Args:
            tokens: ids, [B, S].
            labels: [B, S], each the token that should follow; the caller shifts them.
            positions: [S] or [B, S]; 0, 1, 2, ... unless given.
            gather_logits: return the whole vocabulary's on every rank.
        """
        check_inputs(tokens, labels, positions)
        if self.sequence_parallel:
            check_divides("sequence", tokens.shape[1], axis_size(self.mesh, "tensor"))
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x_BSH = self.embed_tokens(tokens)
        for layer in self.layers:
            x_BSH = layer(x_BSH, positions)
        logits_BSV = self.lm_head(self.norm(x_BSH))
        if labels is not None:
            return mean_cross_entropy(logits_BSV, labels, self.tensor, self.data)
        if gather_logits and self.tensor is not None:
            return all_gather_split(logits_BSV, -1, self.tensor)
        return logits_BSV

    @torch.no_grad()
    def sync_gradients(self, skip: Collection[str] = ()) -> None:
        """Sum every gradient over the mesh axes that its backward did not sum over.

        Every rank calls it after backward, with the same `skip`. A trained parameter
        without a gradient here takes part with zeros, as it may have one elsewhere.

        Args:
            skip: axes over which a wrapper (DDP, ZeRO, FSDP) has summed already.
        """
        trained = [p for p in self.parameters() if p.requires_grad]
        for axis in GRADIENT_AXES:
            if axis in skip or axis_size(self.mesh, axis) == 1:
                continue
            group, works = axis_group(self.mesh, axis), []
            for parameter in trained:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
                works.append(TORCH.all_reduce(parameter.grad, group=group))
            for work in works:
                work.wait()

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients to a norm of at most `max_norm`; what it was before.

        After `sync_gradients`, on every rank. The norm is that of the full model: each
        slice counts once, and what several tensor ranks hold counts once.

        Inside ZeRO or FSDP, which shard the gradients, call theirs.
        """
        held = [(n, p.grad) for n, p in self.named_parameters() if p.grad is not None]
        gradients = [gradient for _, gradient in held]
        if self.tensor is None:
            return nn.utils.clip_grad_norm_(self.parameters(), max_norm)
        counts = [self.placement(name).is_first for name, _ in held]
        return clip_sharded_grad_norm_(gradients, max_norm, self.tensor, counts)

    def shards(self) -> list[Shard]:
        """What this rank holds, for `save_checkpoint` and `load_checkpoint`.

        ZeRO and FSDP save and load what they shard by their own methods.
        """
        return [
            self.placement(name).shard(name, parameter)
            for name, parameter in self.named_parameters()
        ]

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """The call with labels: `self(...)`, so that hooks of wrappers run."""
        return self(tokens, labels)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its slice of the weights that its name stands for."""
        seed, std = self.config.seed, self.config.initializer_range
        for name, parameter in self.named_parameters():
            place = self.placement(name)
            full = full_weight(name, place.full_shape(parameter), seed, std)
            parameter.copy_(place.of(full))

    def placement(self, name: str) -> Placement:
        """Which slice of the parameter `name` this rank holds."""
        size = axis_size(self.mesh, "tensor")
        rank = 0 if self.tensor is None else self.tensor.rank()
        return placement_of(name, self.config, rank, size)

    def all_ranks(self) -> ProcessGroup | None:
        """The group of all ranks of the mesh: they save, load and clip together."""
        return mesh_group(self.mesh)

    def to_empty(self, **options: Any) -> Self:
        """As torch's, but a tied head stays tied."""
        super().to_empty(**options)
        self._tie_and_mark()
        return self

    def _tie_and_mark(self) -> None:
        if self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if axis_size(self.mesh, "tensor") > 1:
            mark_as_slices(self.parameters())
