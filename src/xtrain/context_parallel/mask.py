"""What queries see of keys, one tile at a time: the whole matrix is never made.

    causal      a query sees itself and the keys before it
    window w    and of those itself and the w - 1 before it
    documents   and of those the ones of its own document

Which ones those are is decided by positions in the whole sequence and by ids of
documents: local indices mean nothing once the sequence is cut.

Shapes: B batch, S queries, T keys.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

TILE = 256
Sees = Callable[[slice, slice], Tensor | bool]
"""What queries of a slice see of the keys of another: all, nothing, or a mask."""
Kept = Callable[[slice, slice], Tensor]
"""Dropout's factors of their probabilities, [B, H, rows, columns]: 0 for those that
drop, 1 / (1 - p) for the others."""


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


def sees_by(causal: bool, mask: Tensor | None) -> Sees:
    """By a whole mask if there is one, or else by `causal`."""
    if mask is None:
        return up_to_own if causal else all_of
    return lambda rows, columns: mask.unsqueeze(2)[..., rows, columns]


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


class Ends(NamedTuple):
    """Of groups of tokens, the first and last position and the range of ids."""

    first: Tensor
    last: Tensor
    """[groups]"""
    least: Tensor
    most: Tensor
    """[groups, B], padding left out."""
    alike: Tensor
    """[groups, B], whether all tokens of a group belong to one document."""


def ends_of(groups: Iterable[Tokens]) -> Ends:
    """What tells of most pairs of groups whether one sees the other."""
    found = []
    for positions, documents in groups:
        ids = positions.new_zeros(1, 1) if documents is None else documents
        least = ids.masked_fill(ids < 0, torch.iinfo(ids.dtype).max).amin(1)
        found.append((*positions.aminmax(), least, ids.amax(1), ids.amin(1)))
    first, last, least, most, lowest = map(torch.stack, zip(*found, strict=True))
    return Ends(first, last, least, most, (lowest == most) & (lowest >= 0))


def apart(queries: Ends, keys: Ends, causal: bool, window: int | None) -> Tensor:
    """[groups of queries, of keys]: the ends tell that no query sees any key."""
    q = Ends(*(end.unsqueeze(1) for end in queries))
    hidden = (q.most < keys.least) | (keys.most < q.least)
    nothing = hidden.all(-1)
    if causal:
        nothing |= q.last < keys.first
    if window is not None:
        nothing |= q.first - keys.last >= window
    return nothing


def together(queries: Ends, keys: Ends, causal: bool, window: int | None) -> Tensor:
    """[groups of queries, of keys]: every query sees every key."""
    q = Ends(*(end.unsqueeze(1) for end in queries))
    everything = (q.alike & keys.alike & (q.most == keys.most)).all(-1)
    if causal:
        everything &= q.first >= keys.last
    if window is not None:
        everything &= q.last - keys.first < window
    return everything


class Strip(NamedTuple):
    """At most TILE queries, and neighbouring keys of which they see some."""

    rows: slice
    columns: slice
    whole: bool
    """Every query sees every key."""


class Visible:
    """What some queries see of some keys, by positions and documents."""

    def __init__(self, queries: Tokens, keys: Tokens, causal: bool, window: int | None):
        self.queries, self.keys = queries, keys
        self.causal, self.window = causal, window

    def mask(self, rows: slice, columns: slice) -> Tensor:
        """True where a query sees a key, [B or 1, 1, rows, columns], for any heads."""
        queries, keys = self.queries.part(rows), self.keys.part(columns)
        distance = queries.positions.unsqueeze(-1) - keys.positions
        seen = distance >= 0 if self.causal else torch.ones_like(distance).bool()
        if self.window is not None:
            seen &= distance < self.window
        if queries.documents is None or keys.documents is None:
            return seen[None, None]
        ids = queries.documents.unsqueeze(-1)
        same = (ids == keys.documents.unsqueeze(1)) & (ids >= 0)
        return (seen & same).unsqueeze(1)

    def strips(self) -> list[Strip]:
        """All that is seen: tiles of a row that are next to each other are one strip.

        Ends decide about most tiles; only of the others a mask is made.
        """
        rows = list(tiles(len(self.queries.positions)))
        columns = list(tiles(len(self.keys.positions)))
        queries = ends_of(map(self.queries.part, rows))
        keys = ends_of(map(self.keys.part, columns))
        nothing = apart(queries, keys, self.causal, self.window).tolist()
        everything = together(queries, keys, self.causal, self.window).tolist()
        found: list[Strip] = []
        for r, row in enumerate(rows):
            before = None  # the strip that ends where this tile begins
            for c, tile in enumerate(columns):
                whole = everything[r][c]
                if nothing[r][c] or not (whole or self.mask(row, tile).any()):
                    before = None
                    continue
                if before is not None:
                    tile, whole = (
                        slice(before.columns.start, tile.stop),
                        whole and before.whole,
                    )
                    found.pop()
                before = Strip(row, tile, whole)
                found.append(before)
        return found
