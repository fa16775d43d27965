"""Whole parameters on the one rank that writes them, collected from all that hold some.

    pipeline   0: embedding, layer 0     1: layer 1, head
    tensor     slices 0, 1, 2            slices 0, 1, 2

A parameter's slices are gathered on tensor rank 0, which sends the whole to the rank
that writes: pipeline, data, context and tensor rank 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.model.placement import axis_group
from xtrain.model.span import DecoderSpan


class Collector:
    """What the ranks of a mesh hold of a model, and how it comes to the writer."""

    def __init__(self, modules: Sequence[DecoderSpan], shapes: dict[str, torch.Size]):
        self.shapes, self.mesh = shapes, modules[0].mesh
        self.held = {
            name: (module, parameter.detach())
            for module in modules
            for name, parameter in module.named_parameters()
        }
        self.pipeline, self.tensor, *alike = (
            axis_group(self.mesh, axis)
            for axis in ("pipeline", "tensor", "data", "context")
        )
        self.takes_part = all(map(is_first, alike))
        self.writes = all(map(is_first, (self.pipeline, self.tensor, *alike)))
        mine = {name: parameter.dtype for name, (_, parameter) in self.held.items()}
        held: list[Any] = [mine]
        if self.pipeline is not None:
            held = [None] * self.pipeline.size()
            dist.all_gather_object(held, mine, group=self.pipeline)
        self.dtypes = {n: dtype for names in held for n, dtype in names.items()}
        ranks = reversed(list(enumerate(held)))
        self.holder = {name: rank for rank, names in ranks for name in names}
        """The first pipeline rank that holds a parameter."""

    def nbytes(self, name: str) -> int:
        """Of the whole parameter."""
        return self.shapes[name].numel() * self.dtypes[name].itemsize

    def collect(self, name: str) -> Tensor | None:
        """The whole parameter on the rank that writes, None on all others."""
        if not self.takes_part:
            return None
        holder = self.holder[name]
        here = 0 if self.pipeline is None else self.pipeline.rank()
        whole = self._gather_slices(name) if here == holder else None
        if holder != 0 and is_first(self.tensor):
            if whole is not None:
                dist.send(whole, group=self.pipeline, group_dst=0)
            elif here == 0:
                device = next(iter(self.held.values()))[1].device
                whole = torch.empty(
                    self.shapes[name], dtype=self.dtypes[name], device=device
                )
                dist.recv(whole, group=self.pipeline, group_src=holder)
        return None if whole is None or not self.writes else whole.cpu()

    def _gather_slices(self, name: str) -> Tensor | None:
        """The whole parameter on the first of the tensor ranks."""
        module, local = self.held[name]
        place, group = module.placement(name), self.tensor
        first = is_first(group)
        if group is None or place.count == 1:
            return local.contiguous() if first else None
        pieces = [torch.empty_like(local) for _ in range(group.size())]
        dist.gather(
            local.contiguous(), pieces if first else None, group_dst=0, group=group
        )
        distinct = pieces[:: group.size() // place.count]  # one of equal replicas
        return torch.cat(distinct, place.dim) if first else None


def is_first(group: ProcessGroup | None) -> bool:
    """Whether this is rank 0 of an axis; of one that the mesh does not have it is."""
    return group is None or group.rank() == 0
