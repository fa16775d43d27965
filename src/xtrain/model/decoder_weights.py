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
from xtrain.comm.mesh import set_mesh
from xtrain.comm.wrapper_rules import mark_as_slices, summed_over
from xtrain.expert_parallel import TopKRouter
from xtrain.model.config import XtrainConfig
from xtrain.model.context import SequenceCut
from xtrain.model.gradient_sums import (
    check_skips,
    sum_gradients,
    sum_in_one_bucket,
)
from xtrain.model.mesh_axes import axes_group, axis_size
from xtrain.model.parameters import (
    GRADIENT_AXES,
    TABLES,
    full_weight,
    is_of_experts,
    padded,
    partial_ranks,
    placement_of,
    sum_axes,
)

TIED = "embed_tokens.weight"
"""The one weight of embedding and head, if they are tied: both ends hold it."""


class DecoderWeights(nn.Module):
    """The parameters of these parts: their values, slices and gradients.

    The attributes are those of `DecoderParts`, which makes the modules.
    """

    config: XtrainConfig
    mesh: DeviceMesh | None
    sequence_parallel: bool
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

        Every rank of the mesh calls it after the last backward of a step, with the same
        `skip`. A trained parameter without a gradient here takes part with zeros, as it
        may have one elsewhere. What is summed over several axes is summed once, over
        the ranks of all of them.

        Args:
            skip: axes over which gradients are summed already; unless given, those
                over which a wrapper of xtrain (DDP, ZeRO, FSDP) sums.
        """
        axes = [axis for axis in GRADIENT_AXES if axis_size(self.mesh, axis) > 1]
        if not axes and self.tensor is None:
            return
        check_skips(self.parameters(), axes, skip)
        if not any("tensor" in summed_over(p) for p in self.parameters()):
            self.sum_partial_gradients()
        sums: dict[tuple[str, ...], list[nn.Parameter]] = {}
        for name, parameter in self.named_parameters():
            done = summed_over(parameter) if skip is None else skip
            over = sum_axes(axes, done, is_of_experts(name))
            sums.setdefault(over, []).append(parameter)
        if skip is None:
            skip = {axis for p in self.parameters() for axis in summed_over(p)}
        # groups are made by all ranks: also by those without experts
        kinds = {False, self.config.num_local_experts > 0}
        joint = [over for kind in kinds if (over := sum_axes(axes, skip, kind))]
        groups = {over: axes_group(self.mesh, over) for over in joint}
        for over, parameters in sums.items():
            for part in [over] if over in groups else [(axis,) for axis in over]:
                sum_gradients(parameters, axes_group(self.mesh, part))

    @torch.no_grad()
    def sum_partial_gradients(self) -> None:
        """Sum what tensor ranks have parts of: see `parameters.partial_ranks`.

        `sync_gradients` calls it, or the runner of a pipeline at the end of a step.
        """
        if self.tensor is None:
            return
        buckets: dict[range, list[nn.Parameter]] = {}
        where = self.tensor.rank(), self.tensor.size(), self.sequence_parallel
        for name, parameter in self.named_parameters():
            ranks = partial_ranks(name, self.config, *where)
            buckets.setdefault(ranks, []).append(parameter)
        for ranks in sorted(buckets, key=len):
            if len(ranks) > 1:
                sum_in_one_bucket(buckets[ranks], ranks, self.tensor)

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
            shape = place.full_shape(parameter)
            rows = self.config.vocab_size if name in TABLES else shape[0]
            full = full_weight(name, [rows, *shape[1:]], seed, std)
            parameter.copy_(place.of(padded(full, shape)))

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
