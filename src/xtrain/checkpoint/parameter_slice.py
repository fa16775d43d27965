"""Which box of its full tensor a rank's parameter is, and what a wrapper has of that.

    full [4, 6]     columns, slice 1 of 2     its elements 0 to 7, on 1 of 2 data ranks

    . . . . . .         . . . # # #                  . . . # # #
    . . . . . .         . . . # # #                  . . . # # #
    . . . . . .         . . . # # #                  . . . # . .
    . . . . . .         . . . # # #                  . . . . . .

A module that is sharded over ranks has two methods: `placement(name)` gives the slice
of each parameter, `all_ranks()` the group of all ranks that hold some. Wrappers, which
shard a module over one axis of those ranks, call both through this module.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.checkpoint.boxes import Box
from xtrain.checkpoint.pieces import Shard
from xtrain.comm.autograd import check_divides


@dataclass(frozen=True)
class Placement:
    """Slice `index` of `count` along `dim`; one of one is the whole.

    Of the ranks that hold the same slice one `is_first`: its copy alone is counted, as
    in a norm. A parameter that is cut along two dims, as stacked experts over expert
    ranks and each expert over tensor ranks, has the second cut in `inner`. After `rows`
    rows the full parameter is padding, which is not saved.
    """

    dim: int = 0
    index: int = 0
    count: int = 1
    is_first: bool = True
    inner: "Placement | None" = None
    rows: int | None = None

    def cuts(self) -> "Iterator[Placement]":
        """This cut and the one within it."""
        yield self
        if self.inner is not None:
            yield from self.inner.cuts()

    def of(self, full: Tensor) -> Tensor:
        """This slice of the full parameter, in memory of its own."""
        slice_ = full.detach()
        for cut in self.cuts():
            length = full.shape[cut.dim]
            what = f"dim {cut.dim} of a weight {list(full.shape)}"
            check_divides(what, length, cut.count)
            part = length // cut.count
            slice_ = slice_.narrow(cut.dim, cut.index * part, part)
        return slice_.clone()

    def full_shape(self, local: Tensor | Size) -> list[int]:
        """The shape of what `local`, or a tensor of that shape, is a slice of."""
        full = list(local.shape if isinstance(local, Tensor) else local)
        for cut in self.cuts():
            if cut.count > 1:
                full[cut.dim] *= cut.count
        return full

    def box(self, shape: Size) -> Box:
        """Where a slice of this shape lies in the full parameter."""
        offset = [0] * len(shape)
        for cut in self.cuts():
            if cut.count > 1:
                offset[cut.dim] = cut.index * shape[cut.dim]
        return Box(tuple(offset), tuple(shape))

    def shard(self, name: str, tensor: Tensor) -> Shard:
        """The slice `tensor` of the parameter `name`."""
        full = tuple(self.full_shape(tensor))
        offset = self.box(tensor.shape).offset
        return Shard(name, full, offset, tensor, rows=self.rows)

    def flat_shard(self, name: str, shape: Size, start: int, part: Tensor) -> Shard:
        """What begins at element `start` of the flattened slice of this shape."""
        full = tuple(self.full_shape(shape))
        return Shard(name, full, start, part, self.box(shape), self.rows)


def placement_in(module: nn.Module, name: str) -> Placement:
    """A module's `placement(name)`; the whole parameter where it has no such method."""
    find = getattr(module, "placement", None)
    return Placement() if find is None else find(name)


def all_ranks_of(module: nn.Module, group: ProcessGroup | None) -> ProcessGroup | None:
    """All ranks that hold a part of a module, `group` being one axis of them."""
    find = getattr(module, "all_ranks", None)
    return group if find is None else find() or group
