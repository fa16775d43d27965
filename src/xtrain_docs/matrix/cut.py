"""The model of the support matrix, its blocks cut over tensor ranks.

It says which slice of each parameter it has, as every module does that is cut: so ZeRO
and FSDP over the data ranks clip by the norm of the full model.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn import functional as F

from xtrain.checkpoint.parameter_slice import Placement
from xtrain.comm.autograd import (
    all_gather_split,
    identity_all_reduce,
    split_all_gather,
)
from xtrain.tensor_parallel import ColumnParallelLinear, RowParallelLinear

from .toy import Block, Toy

DIMS = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


class CutBlock(Block):
    """A block whose matrices are slices; sequence parallel between them or not."""

    def __init__(self, full: Block, sequence_parallel: bool, group: ProcessGroup):
        nn.Module.__init__(self)
        options: dict[str, Any] = {
            "sequence_parallel": sequence_parallel,
            "group": group,
        }
        self.norm, self.gate, self.leave_out = full.norm, full.gate, full.leave_out
        self.up = ColumnParallelLinear.from_full(full.up, **options)
        self.down = RowParallelLinear.from_full(full.down, **options)
        for name, parameter in full.named_parameters():
            self.get_parameter(name).requires_grad_(parameter.requires_grad)
        self.group = group if sequence_parallel else None

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None and not self.leave_out:
            x = x * self.summed(self.gate)
        weight, bias = self.summed(self.norm.weight), self.summed(self.norm.bias)
        normed = F.layer_norm(x, self.norm.normalized_shape, weight, bias)
        return x + self.down(torch.tanh(self.up(normed)))

    def summed(self, parameter: Tensor) -> Tensor:
        """Used on slices of the sequence, so its gradient is their sum."""
        if self.group is None:
            return parameter
        return identity_all_reduce(parameter, self.group)


class CutToy(Toy):
    """A Toy of which each tensor rank has a part; the group `everyone` has it all."""

    tensor: ProcessGroup
    everyone: ProcessGroup | None
    sequence_parallel: bool

    def enter_blocks(self, x: Tensor) -> Tensor:
        return split_all_gather(x, 1, self.tensor) if self.sequence_parallel else x

    def leave_blocks(self, x: Tensor) -> Tensor:
        return all_gather_split(x, 1, self.tensor) if self.sequence_parallel else x

    def placement(self, name: str) -> Placement:
        rank, size = self.tensor.rank(), self.tensor.size()
        for end, dim in DIMS.items():
            if name.endswith(end):
                return Placement(dim, rank, size)
        return Placement(is_first=rank == 0)

    def same_cut(self, toy: Toy) -> "CutToy":
        """Another Toy, cut as this one is."""
        return cut(toy, self.sequence_parallel, self.tensor, self.everyone)

    def all_ranks(self) -> ProcessGroup | None:
        return self.everyone


def cut(
    toy: Toy,
    sequence_parallel: bool,
    tensor: ProcessGroup,
    everyone: ProcessGroup | None,
) -> CutToy:
    """The same model with this rank's slices of the blocks' matrices."""
    toy.__class__ = CutToy
    assert isinstance(toy, CutToy)
    toy.tensor, toy.everyone = tensor, everyone
    toy.sequence_parallel = sequence_parallel
    for number, block in enumerate(toy.layers):
        assert isinstance(block, Block)
        toy.layers[number] = CutBlock(block, sequence_parallel, tensor)
    return toy


def whole_weights(toy: CutToy, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The full tensors, on every rank, of every tensor rank's slices."""
    found = {}
    for name, tensor in weights.items():
        place = toy.placement(name)
        if place.count > 1:
            slices = [torch.empty_like(tensor) for _ in range(place.count)]
            dist.all_gather(slices, tensor.detach().contiguous(), group=toy.tensor)
            tensor = torch.cat(slices, place.dim)
        found[name] = tensor
    return found


def groups_of(ranks: int, tensor: int) -> tuple[ProcessGroup, ProcessGroup]:
    """This rank's data group and tensor group; every rank calls it."""
    lists = torch.arange(ranks).view(-1, tensor)
    return own_group(lists.T.tolist()), own_group(lists.tolist())


def own_group(lists: Sequence[list[int]]) -> ProcessGroup:
    groups = [dist.new_group(members) for members in lists]
    mine = dist.get_rank()
    return next(g for g, who in zip(groups, lists, strict=True) if mine in who)
