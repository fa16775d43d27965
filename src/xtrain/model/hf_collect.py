"""Whole tensors of a file on the one rank that writes them, from all that hold some.

    pipeline   0: embedding, layer 0     1: layer 1, head
    expert     experts 0, 1              experts 2, 3
    tensor     slices 0, 1, 2            slices 0, 1, 2

A tensor's slices are gathered on tensor rank 0. That of an expert goes from the expert
rank that has it to the first one; and everything from the pipeline rank that has it to
the first: the rank that writes is the first of every axis.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.checkpoint.parameter_slice import Placement
from xtrain.comm.mesh import REPLICA_AXES, axis_group
from xtrain.model.hf_names import hf_sources
from xtrain.model.placement import is_first
from xtrain.model.span import DecoderSpan


class Collector:
    """What the ranks of a mesh hold of a model, and how it comes to the writer."""

    def __init__(self, modules: Sequence[DecoderSpan], shapes: dict[str, torch.Size]):
        self.sources, self.mesh = hf_sources(shapes), modules[0].mesh
        self.held = {
            name: (module, parameter.detach())
            for module in modules
            for name, parameter in module.named_parameters()
        }
        self.pipeline, self.expert, self.tensor, *alike = (
            axis_group(self.mesh, axis)
            for axis in ("pipeline", "expert", "tensor", *REPLICA_AXES, "context")
        )
        self.takes_part = all(map(is_first, alike))
        cut = self.pipeline, self.expert, self.tensor
        self.writes = all(map(is_first, (*cut, *alike)))
        mine = {name: parameter.dtype for name, (_, parameter) in self.held.items()}
        held: list[Any] = [mine]
        if self.pipeline is not None:
            held = [None] * self.pipeline.size()
            dist.all_gather_object(held, mine, group=self.pipeline)
        self.dtypes = {n: dtype for names in held for n, dtype in names.items()}
        self.dtype = self.dtypes[next(iter(shapes))]
        ranks = reversed(list(enumerate(held)))
        self.holder = {name: rank for rank, names in ranks for name in names}
        """The first pipeline rank that holds a parameter."""

    def nbytes(self, name: str) -> int:
        """Of the whole tensor of a file."""
        source = self.sources[name]
        return source.shape.numel() * self.dtypes[source.parameter].itemsize

    def collect(self, name: str) -> Tensor | None:
        """The whole tensor on the rank that writes, None on all others."""
        parameter, expert, _ = self.sources[name]
        if not self.takes_part:
            return None
        holder, whole, owner = self.holder[parameter], None, 0
        if rank_in(self.pipeline) == holder:
            if expert is not None:
                owner = expert // len(self.held[parameter][1])
            if rank_in(self.expert) == owner:
                whole = self._gather_slices(parameter, expert)
            if is_first(self.tensor):
                whole = self._to_first(whole, name, owner, self.expert)
        if is_first(self.tensor) and is_first(self.expert):
            whole = self._to_first(whole, name, holder, self.pipeline)
        return None if whole is None or not self.writes else whole.cpu()

    def _to_first(
        self, whole: Tensor | None, name: str, source: int, group: ProcessGroup | None
    ) -> Tensor | None:
        """From rank `source` of a group, which has the tensor, to its first rank."""
        if source == 0 or group is None:
            return whole
        if group.rank() == source:
            assert whole is not None
            dist.send(whole, group=group, group_dst=0)
        if group.rank() > 0:
            return None
        parameter, _, shape = self.sources[name]
        device = next(iter(self.held.values()))[1].device
        whole = torch.empty(shape, dtype=self.dtypes[parameter], device=device)
        dist.recv(whole, group=group, group_src=source)
        return whole

    def _gather_slices(self, name: str, expert: int | None) -> Tensor | None:
        """The whole tensor on the first of the tensor ranks."""
        module, local = self.held[name]
        place, group = module.placement(name), self.tensor
        if expert is not None:
            local = local[expert % len(local)]
            place = place.inner or Placement()
            place = replace(place, dim=place.dim - 1)
        first = is_first(group)
        if group is None or place.count == 1:
            return local.contiguous() if first else None
        pieces = [torch.empty_like(local) for _ in range(group.size())]
        dist.gather(
            local.contiguous(), pieces if first else None, group_dst=0, group=group
        )
        distinct = pieces[:: group.size() // place.count]  # one of equal replicas
        return torch.cat(distinct, place.dim) if first else None


def rank_in(group: ProcessGroup | None) -> int:
    """This rank's number on an axis; 0 on one that the mesh does not have."""
    return 0 if group is None else group.rank()
