"""What ranks hold of a tensor: shards in memory, which checkpoints keep as pieces.

Shard   a tensor of this rank, and which part of which full tensor it is:
        a box (rows, columns, an expert), or a range of the elements of one, flat
Piece   one box of a tensor, with its elements; a flat shard is a few of them
"""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from xtrain.checkpoint.boxes import Box, boxes_of_range


class About(NamedTuple):
    """What must be the same here and in a checkpoint.

    Attributes:
        padded: the shape with rows of padding, which older checkpoints have.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    padded: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of the full tensor `name`, from `offset` on and as large as its data."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    data: Tensor

    @property
    def box(self) -> Box:
        return Box(self.offset, tuple(self.data.shape))

    def before_row(self, row: int) -> "Piece":
        """What it has of the full tensor's rows before this one."""
        return replace(self, data=self.data[: max(0, row - self.offset[0])])


@dataclass(frozen=True, slots=True)
class Shard:
    """What this rank holds of the full tensor `name`.

    Args:
        name: the same on every rank that holds a part of the tensor.
        shape: of the full tensor.
        offset: where `tensor` begins in each dim of the full tensor; or, if `tensor`
            is flat, the number of its first element in the flattened `box`.
        tensor: its elements, and what the optimizer steps if it is a parameter.
        box: of a flat tensor, the part of the full tensor that it is a range of; all of
            it unless given.
        rows: of the full tensor, those before its padding: rows of zeros at its end,
            as many as this layout needs, which are in no piece.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...] | int
    tensor: Tensor
    box: Box | None = None
    rows: int | None = None

    @property
    def about(self) -> About:
        padded = None if self.rows is None else tuple(self.shape)
        return About(self.saved_shape, self.tensor.dtype, padded)

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """Of the full tensor without padding."""
        shape = tuple(self.shape)
        return shape if self.rows is None else (self.rows, *shape[1:])

    def pieces(
        self, data: Tensor | None = None, name: str | None = None
    ) -> list[Piece]:
        """The boxes that the shard is, as views of `data` (of the tensor unless given).

        A shard without elements makes no piece.
        """
        data = (self.tensor if data is None else data).detach()
        name, shape = name or self.name, self.saved_shape
        if not isinstance(self.offset, int):
            found = [Piece(name, shape, tuple(self.offset), data)]
        else:
            outer = self.outer
            boxes = boxes_of_range(outer.size, self.offset, self.offset + data.numel())
            places = [box.moved_by(outer.offset).offset for box in boxes]
            parts = data.split([box.numel for box in boxes])
            found = [
                Piece(name, shape, place, part.view(box.size))
                for place, box, part in zip(places, boxes, parts, strict=True)
            ]
        if self.rows is not None:
            found = [piece.before_row(self.rows) for piece in found]
        return [piece for piece in found if piece.data.numel()]

    @property
    def outer(self) -> Box:
        """What a flat tensor is a range of."""
        shape = tuple(self.shape)
        return Box((0,) * len(shape), shape) if self.box is None else self.box

    def check(self) -> None:
        """ValueError unless the shard lies within its full tensor."""
        if not self.name or self.name.startswith(":"):
            raise ValueError(
                f"{self.name!r} is not a name: it is empty or begins with ':'"
            )
        if isinstance(self.offset, int):
            end, last = self.offset + self.tensor.numel(), self.outer.numel
            fits = self.tensor.dim() == 1 and self.offset >= 0 and end <= last
            fits = fits and is_within(self.outer, self.shape)
        else:
            fits = is_within(Box(self.offset, tuple(self.tensor.shape)), self.shape)
        if not fits:
            raise ValueError(
                f"{self.name}: a shard of shape {list(self.tensor.shape)} from "
                f"{self.offset} on is not within {self._limits()}"
            )

    def _limits(self) -> str:
        within = str(list(self.shape))
        if self.box is not None:
            within = f"{list(self.box.size)} at {list(self.box.offset)} of {within}"
        return within


def is_within(box: Box, shape: tuple[int, ...]) -> bool:
    """Whether a tensor of this shape has all elements of a box."""
    ends = zip(box.offset, box.size, shape, strict=False)
    same_dims = len(box.offset) == len(box.size) == len(shape)
    return same_dims and all(0 <= o <= o + s <= n for o, s, n in ends)


def whole(name: str, tensor: Tensor) -> Shard:
    """A tensor that this rank holds in full."""
    return Shard(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def persistent_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that the module's `state_dict` has; the others are made anew."""
    kept = module.state_dict().keys()
    return {name: t for name, t in module.named_buffers() if name in kept}
