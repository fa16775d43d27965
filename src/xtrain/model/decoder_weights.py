"""The weights of some parts of the decoder: their first values, slices and gradients.

A parameter has the name that it has in the whole model. The name determines the first
values, a slice of the full tensor drawn from a seed of the name; the slice that a
tensor or expert rank holds; and the mesh axes over which its gradient is summed.
"""

from collections.abc import Collection
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import Shard
from xtrain.checkpoint.parameter_slice import Placement
from xtrain.checkpoint.pieces import whole
from xtrain.comm.mesh import axis_group, set_mesh
from xtrain.comm.wrapper_rules import mark_as_slices, summed_over
from xtrain.expert_parallel import TopKRouter
from xtrain.model.config import XtrainConfig
from xtrain.model.context import SequenceCut
from xtrain.model.gradient_sums import check_skips, sum_gradients
from xtrain.model.mesh_axes import axis_size
from xtrain.model.parameters import (
    GRADIENT_AXES,
    full_weight,
    is_summed_over,
    placement_of,
)

TIED = "embed_tokens.weight"
"""The one weight of embedding and head, if they are tied: both ends hold it."""


class DecoderWeights(nn.Module):
    """The parameters of these parts: their values, slices and gradients.

    The attributes are those of `DecoderParts`, which makes the modules.
    """

    config: XtrainConfig
    mesh: DeviceMesh | None
    is_copy: bool
    tensor: ProcessGroup | None
    expert: ProcessGroup | None
    context: SequenceCut | None
    has_embedding: bool
    has_head: bool
    embed_tokens: nn.Module
    lm_head: nn.Module

    @torch.no_grad()
    def sync_gradients(self, skip: Collection[str] | None = None) -> None:
        """Sum every gradient over the mesh axes over which no wrapper has summed it.

        Every rank calls it after backward, with the same `skip`. A trained parameter
        without a gradient here takes part with zeros, as it may have one elsewhere.

        Args:
            skip: axes over which gradients are summed already; unless given, those
                over which a wrapper of xtrain (DDP, ZeRO, FSDP) sums.
        """
        axes = [axis for axis in GRADIENT_AXES if axis_size(self.mesh, axis) > 1]
        check_skips(self.parameters(), axes, skip)
        for axis in axes:
            summed = (
                parameter
                for name, parameter in self.named_parameters()
                if is_summed_over(name, axis)
                and axis not in (summed_over(parameter) if skip is None else skip)
            )
            sum_gradients(summed, axis_group(self.mesh, axis))

    def shards(self) -> list[Shard]:
        """Parameters and buffers, for `save_checkpoint` and `load_checkpoint`.

        ZeRO and FSDP save and load what they shard by their own methods.
        """
        parameters = [
            self.placement(name).shard(name, parameter)
            for name, parameter in self.named_parameters()
        ]
        return parameters + [whole(*named) for named in self.named_buffers()]

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Give every parameter its slice of the weights of its name.

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
        set_mesh(self, self.mesh)
