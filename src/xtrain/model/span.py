"""Consecutive parts of the decoder: the whole of it, or what one stage holds.

    number     0          1        2       ...   L          L + 1
               embedding, layer 0, layer 1, ..., layer L-1, norm and head

    span of a stage           range(2, 4): layers 1 and 2, nothing else is allocated
    span of the whole model   range(0, L + 2)

Parameters have the names of the whole model, so that the first weights, which slice a
tensor rank holds, checkpoints and published files do not ask how it is cut.

Shapes: B batch, S sequence, H hidden, V vocabulary, t tensor ranks, c context ranks.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import Shard
from xtrain.checkpoint.pieces import whole
from xtrain.checkpoint.placement import Placement
from xtrain.comm.autograd import check_divides
from xtrain.comm.collective_choice import TORCH
from xtrain.comm.wrapper_rules import mark_as_slices
from xtrain.expert_parallel import MoE, Routing, TopKRouter
from xtrain.model.balance import CopyCounts
from xtrain.model.checks import check_inputs
from xtrain.model.config import XtrainConfig
from xtrain.model.context import sequence_cut
from xtrain.model.gradient_sums import check_skip, gradients_to_sum
from xtrain.model.initialize import full_weight
from xtrain.model.layer import make_layer
from xtrain.model.loss import IGNORED
from xtrain.model.parts import CutParts, WholeParts
from xtrain.model.placement import (
    GRADIENT_AXES,
    axis_group,
    axis_size,
    batch_group,
    is_summed_over,
    mesh_group,
    placement_of,
    replica_group,
)
from xtrain.tensor_parallel.shards import check_ids

TIED = "embed_tokens.weight"
"""The one weight of embedding and head, if they are tied: both ends hold it."""


class DecoderSpan(nn.Module):
    """The parts of the decoder with these numbers.

    Args:
        span: their numbers, as above.
        is_copy: another rank holds the same span and counts for both.
    """

    def __init__(
        self,
        config: XtrainConfig,
        mesh: DeviceMesh | None,
        span: range,
        *,
        is_copy: bool = False,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        sequence_parallel: bool = False,
        context_attention: str = "ring",
        context_balance: str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.config, self.mesh, self.span, self.is_copy = config, mesh, span, is_copy
        self.sequence_parallel = sequence_parallel
        self.copies = CopyCounts(config)
        self.tensor, self.expert = (
            axis_group(mesh, axis) for axis in ("tensor", "expert")
        )
        self.data, self.replicas = batch_group(mesh), replica_group(mesh)
        self.context = sequence_cut(
            config, mesh, attention, context_attention, context_balance
        )
        if self.context is not None:
            attention = self.context.attend
        parts = WholeParts(config, attention, self.expert)
        if self.tensor is not None:
            cut = sequence_parallel, self.tensor, self.expert
            parts = CutParts(config, attention, *cut)
        last = config.num_hidden_layers + 1
        self.has_embedding, self.has_head = 0 in span, last in span
        with torch.device("meta"):  # filled below, each weight once
            if self.has_embedding or (self.has_head and config.tie_word_embeddings):
                self.embed_tokens = parts.embedding()
            self.layers = nn.ModuleList()
            for number in span:
                if 0 < number < last:  # named by its number in the whole model
                    layer = make_layer(parts, number - 1)
                    self.layers.add_module(str(number - 1), layer)
            if self.has_head:
                self.norm, self.lm_head = parts.norm(), parts.head()
        self.to(dtype or torch.get_default_dtype())
        self._tie_and_mark()
        device = torch.device(device or torch.get_default_device())
        if device.type != "meta":
            self.to_empty(device=device)
            self.reset_parameters()

    def run(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        through: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """Tokens [B, S] or activations [B, S / c, H] through these parts, to
        activations or logits [B, S / c, V / t]; with sequence_parallel activations are
        [B, S / c / t, H]. Tokens and positions are those of whole sequences.

        Args:
            through: what runs the layers, if not one after the other.
        """
        if positions is None:
            positions = torch.arange(self.whole_length(x), device=x.device)
        if self.context is not None:
            positions = self.context.shard(positions, -1)
            x = self.context.shard(x) if self.has_embedding else x
        if self.has_embedding:
            x = self.embed_tokens(x)
        x = (through or self.through_layers)(x, positions)
        if self.config.balance_bias:
            self.copies.count(self.routings())
        return self.lm_head(self.norm(x)) if self.has_head else x

    def through_layers(self, x: Tensor, positions: Tensor) -> Tensor:
        """One layer after the other."""
        for layer in self.layers:
            x = layer(x, positions)
        return x

    def routings(self) -> dict[int, Routing]:
        """What each router of these layers decided in its last forward."""
        found = {}
        for name, layer in self.layers.named_children():
            for part in layer.modules():  # a wrapper may be around the layer
                if isinstance(part, MoE) and part.router.stats is not None:
                    found[int(name)] = part.router.stats.routing
        return found

    def whole_length(self, x: Tensor) -> int:
        """How many tokens the whole sequences have of which `x` is what `run` gets."""
        length = x.shape[1]
        if not self.has_embedding:
            length *= axis_size(self.mesh, "context")
            if self.sequence_parallel:
                length *= axis_size(self.mesh, "tensor")
        return length

    def check_call(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
    ) -> None:
        """ValueError unless this rank's batch fits the model."""
        check_inputs(tokens, labels, positions)
        cuts = axis_size(self.mesh, "tensor") if self.sequence_parallel else 1
        if self.context is not None:
            self.context.check_sequence(tokens.shape[1], cuts)
        else:
            check_divides("sequence", tokens.shape[1], cuts)
        check_ids(tokens, self.config.vocab_size)
        if labels is not None:
            check_ids(labels, self.config.vocab_size, IGNORED)

    @torch.no_grad()
    def sync_gradients(self, skip: Collection[str] = ()) -> None:
        """Sum every gradient over the mesh axes that its backward did not sum over.

        Every rank calls it after backward, with the same `skip`. A trained parameter
        without a gradient here takes part with zeros, as it may have one elsewhere.

        Args:
            skip: axes over which a wrapper (DDP, ZeRO, FSDP) has summed already.
        """
        axes = [axis for axis in GRADIENT_AXES if axis_size(self.mesh, axis) > 1]
        for axis in axes:
            check_skip(self.parameters(), axis, skip)
        for axis in axes:
            if axis not in skip:
                group = axis_group(self.mesh, axis)
                gradients = gradients_to_sum(
                    parameter
                    for name, parameter in self.named_parameters()
                    if is_summed_over(name, axis)
                )
                works = [TORCH.all_reduce(g, group=group) for g in gradients]
                for work in works:
                    work.wait()

    def shards(self) -> list[Shard]:
        """What this rank holds, for `save_checkpoint` and `load_checkpoint`.

        ZeRO and FSDP save and load what they shard by their own methods.
        """
        parameters = [
            self.placement(name).shard(name, parameter)
            for name, parameter in self.named_parameters()
        ]
        return parameters + [whole(*named) for named in self.named_buffers()]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its slice of the weights that its name stands for.

        Biases of routers begin with zeros.
        """
        for buffer in self.buffers():
            buffer.zero_()
        seed, std = self.config.seed, self.config.initializer_range
        for name, parameter in self.named_parameters():
            place = self.placement(name)
            full = full_weight(name, place.full_shape(parameter), seed, std)
            parameter.copy_(place.of(full))

    def placement(self, name: str) -> Placement:
        """Which slice of the parameter `name` this rank holds."""
        place = self.slice_of(name)
        is_copy = self.is_copy or (name == TIED and not self.has_embedding)
        if is_copy or (self.context is not None and self.context.group.rank() > 0):
            return replace(place, is_first=False)
        return place

    def slice_of(self, name: str) -> Placement:
        """The same among this rank's tensor and expert ranks alone."""
        where = []
        for group in (self.tensor, self.expert):
            where += [0, 1] if group is None else [group.rank(), group.size()]
        return placement_of(name, self.config, *where)

    def all_ranks(self) -> ProcessGroup | None:
        """The group of all ranks of the mesh: they save, load and clip together."""
        return mesh_group(self.mesh)

    def to_empty(self, **options: Any) -> Self:
        """As torch's, but a tied head stays tied."""
        super().to_empty(**options)
        self._tie_and_mark()
        return self

    def _apply(self, *args: Any, **options: Any) -> Self:
        """As torch's, but biases of routers stay in at least fp32: small steps."""
        super()._apply(*args, **options)
        for module in self.modules():
            if isinstance(module, TopKRouter) and module.balance_bias is not None:
                wide = torch.promote_types(module.balance_bias.dtype, torch.float32)
                module.balance_bias = module.balance_bias.to(wide)
        return self

    def _tie_and_mark(self) -> None:
        if self.has_head and self.config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        if any(axis_size(self.mesh, axis) > 1 for axis in ("tensor", "expert")):
            mark_as_slices(self.parameters())
