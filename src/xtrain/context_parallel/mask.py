"""What queries see of keys, one tile at a time: the whole matrix is never made.

    causal      a query sees itself and the keys before it
    window w    and of those itself and the w - 1 before it
    documents   and of those the ones of its own document

Which ones those are is decided by positions in the whole sequence and by ids of
documents: local indices mean nothing once the sequence is cut.

Shapes: B batch, S queries, T keys.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 256
Sees = Callable[[slice, slice], Tensor | bool]
"""What queries of a slice see of the keys of another: all, nothing, or a mask."""


def tiles(length: int) -> Iterator[slice]:
    """The slices of at most TILE that make up a length."""
    for start in range(0, length, TILE):
        yield slice(start, min(start + TILE, length))


def all_of(rows: slice, columns: slice) -> bool:
    """No mask."""
    return True


def up_to_own(rows: slice, columns: slice) -> Tensor | bool:
    """The causal mask: query x sees keys 0 to x."""
    if columns.start >= rows.stop or columns.stop <= rows.start + 1:
        return columns.start < rows.stop
    x = torch.arange(rows.start, rows.stop)
    return torch.arange(columns.start, columns.stop) <= x.unsqueeze(-1)


def hide(scores: Tensor, seen: Tensor | bool) -> None:
    """-inf where a query does not see a key."""
    if isinstance(seen, Tensor):
        scores.masked_fill_(~seen.to(scores.device), float("-inf"))


class Tokens(NamedTuple):
    """Where some tokens stand in the whole sequence, on the CPU."""

    positions: Tensor
    """[S]"""
    documents: Tensor | None = None
    """[B, S]; a negative id is padding, which sees nothing and is never seen."""

    def part(self, of: slice) -> "Tokens":
        ids = self.documents
        return Tokens(self.positions[of], None if ids is None else ids[:, of])

    def one_document(self) -> int | None:
        """The id that all of them have, or None: padding, or several."""
        if self.documents is None:
            return 0
        least, most = self.documents.aminmax()
        return int(least) if least == most and least >= 0 else None

    def range_of_documents(self) -> tuple[Tensor, Tensor]:
        """The least and the largest id of each sequence, padding left out, [B]."""
        ids = self.documents
        if ids is None:
            return torch.zeros(1), torch.zeros(1)
        none = torch.iinfo(ids.dtype).max
        return ids.masked_fill(ids < 0, none).amin(1), ids.amax(1)


class Visible:
    """A `Sees` by positions and documents."""

    def __init__(self, queries: Tokens, keys: Tokens, causal: bool, window: int | None):
        self.queries, self.keys = queries, keys
        self.causal, self.window = causal, window

    def __call__(self, rows: slice, columns: slice) -> Tensor | bool:
        queries, keys = self.queries.part(rows), self.keys.part(columns)
        distance = queries.positions.unsqueeze(-1) - keys.positions
        seen = distance >= 0 if self.causal else torch.ones_like(distance).bool()
        if self.window is not None:
            seen &= distance < self.window
        if queries.documents is not None and keys.documents is not None:
            ids = queries.documents.unsqueeze(-1)
            same = (ids == keys.documents.unsqueeze(1)) & (ids >= 0)
            seen = (seen & same)[:, None, None]  # [B, 1, 1, S, T], for any heads
        return seen if seen.any() and not seen.all() else bool(seen.any())

    def hides_nothing(self) -> bool:
        """Whether window and documents leave everything as it is without them."""
        last, first = self.queries.positions.max(), self.keys.positions.min()
        reaches = self.window is None or bool(last - first < self.window)
        document = self.queries.one_document()
        return reaches and document is not None and document == self.keys.one_document()

    def far_apart(self) -> bool:
        """Whether the ends of both tell already that no query sees any key."""
        first, last = self.queries.positions.min(), self.keys.positions.max()
        if self.window is not None and bool(first - last >= self.window):
            return True
        least, most = self.queries.range_of_documents()
        from_, to = self.keys.range_of_documents()
        return bool(((most < from_) | (to < least)).all())

    def hides_everything(self) -> bool:
        """Whether no query sees any key; ends at the first tile with one that does."""
        if self.far_apart():
            return True
        every_tile = (
            self(rows, columns)
            for rows in tiles(len(self.queries.positions))
            for columns in tiles(len(self.keys.positions))
        )
        return all(seen is False for seen in every_tile)
