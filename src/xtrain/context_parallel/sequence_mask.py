"""What the tokens of one rank see of another rank's, planned once and used by all.

nothing                                     the ranks have no blocks
all, or a triangle (`block_of`)             one block, a kernel without a mask
what a window and documents leave of it     strips, each with a mask of its own

A `SequenceMask` does not depend on q, k and v: made once for a batch, it serves all
layers, forward, backward and what a checkpoint recomputes. `dropping` is the same mask
for one call, whose probabilities drop by their places in the whole sequence.
"""

from collections.abc import Callable
from functools import cached_property, partial

import torch
from torch import Tensor

from xtrain.context_parallel.balance import Balance, Block, block_of, positions_of
from xtrain.context_parallel.deal import Deal
from xtrain.context_parallel.mask import Tokens, Visible, apart, ends_of, together

Dropout = Callable[[slice, Tensor, Tensor], Tensor]
"""Of some heads, positions of queries [S] and of keys [T] in the whole sequence: the
factors of their probabilities, [B, heads, S, T], 0 for those that drop, 1 / (1 - p) for
the others."""


class SequenceMask:
    """The mask of a whole sequence, asked for by the ranks of queries and of keys.

    Args:
        size: the ranks it is cut over.
        queries, keys: their numbers on each rank.
        documents: of all ranks, [size, B, S].
    """

    def __init__(
        self,
        size: int,
        queries: int,
        keys: int,
        causal: bool,
        balance: Balance = "none",
        window: int | None = None,
        documents: Tensor | None = None,
    ):
        self.size, self.queries, self.keys = size, queries, keys
        self.causal, self.balance = causal, balance
        self.window, self.documents = window, documents
        self._planned: dict[tuple[int, int], tuple[Block, ...]] = {}
        self._windows: dict[int | None, SequenceMask] = {window: self}

    def within(self, window: int | None) -> "SequenceMask":
        """The same with another window: the layers of a model may have several."""
        if window not in self._windows:
            made = SequenceMask(
                self.size, self.queries, self.keys, self.causal, self.balance, window,
                self.documents,
            )  # fmt: skip
            self._windows[window] = made
        return self._windows[window]

    def blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """What the queries of one rank see of another's keys."""
        ranks = query_rank, key_rank
        if ranks not in self._planned:
            with torch.device("cpu"):  # where masks are made, as the documents are
                self._planned[ranks] = self.plan(*ranks)
        return self._planned[ranks]

    def dropping(self, dropout: Dropout | None, heads: slice) -> "SequenceMask":
        """The same, of whose blocks these heads drop; without dropout this one."""
        return self if dropout is None else DroppingMask(self, dropout, heads)

    def plan(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """The same, from positions and documents."""
        block = self.without_documents(query_rank, key_rank)
        hides = self.window is not None or self.documents is not None
        dealt = isinstance(self.balance, Deal)  # what is seen is in the positions only
        if block is None or not (hides or dealt):
            return () if block is None else (block,)
        queries = self.tokens(query_rank, self.queries).part(block.queries)
        keys = self.tokens(key_rank, self.keys).part(block.keys)
        ends = ends_of([queries]), ends_of([keys])
        if together(*ends, self.causal and dealt, self.window):
            return (block,)  # nothing of it is hidden
        if apart(*ends, self.causal, self.window):
            return ()
        visible = Visible(queries, keys, self.causal, self.window)
        return tuple(
            Block(
                inside(block.queries, rows),
                inside(block.keys, columns),
                False,
                None if whole else partial(visible.mask, rows, columns),
            )
            for rows, columns, whole in visible.strips()
        )

    def without_documents(self, query_rank: int, key_rank: int) -> Block | None:
        """What the queries could see of the keys, if window and documents let them."""
        if self.causal and isinstance(self.balance, str):
            return block_of(self.balance, query_rank, key_rank, self.keys, True)
        return Block(slice(0, self.queries), slice(0, self.keys), False)

    @cached_property
    def steps(self) -> int:
        """Of a ring: one more than the hops from any rank to the last that sees it."""
        if self.window is None and self.documents is None:
            return self.size
        with torch.device("cpu"):
            ranks = torch.arange(self.size)
            ends = ends_of(self.tokens(rank, self.keys) for rank in range(self.size))
            seen = ~apart(ends, ends, self.causal, self.window)
            return 1 + int(((ranks[:, None] - ranks) % self.size * seen).max())

    def tokens(self, rank: int, length: int) -> Tokens:
        """Of one rank."""
        positions = positions_of(rank, self.size, length, self.balance)
        return Tokens(
            positions, None if self.documents is None else self.documents[rank]
        )

    @cached_property
    def joined(self) -> "SequenceMask":
        """The same for a rank that has the whole sequence, whose ranks hold runs."""
        ids = self.documents
        if ids is not None:
            ids = torch.cat(ids.unbind(), 1).unsqueeze(0)
        lengths = self.size * self.queries, self.size * self.keys
        return SequenceMask(1, *lengths, self.causal, "none", self.window, ids)


class DroppingMask(SequenceMask):
    """A mask for one call; what it plans is what the mask it is made of has planned."""

    def __init__(self, mask: SequenceMask, dropout: Dropout, heads: slice):
        super().__init__(
            mask.size, mask.queries, mask.keys, mask.causal, mask.balance, mask.window,
            mask.documents,
        )  # fmt: skip
        self.mask, self.factors = mask, partial(dropout, heads)
        self.steps = mask.steps

    def blocks(self, query_rank: int, key_rank: int) -> tuple[Block, ...]:
        """Those of the mask, with dropout's factors."""
        with torch.device("cpu"):
            queries = self.tokens(query_rank, self.queries).positions
            keys = self.tokens(key_rank, self.keys).positions
        return tuple(
            block._replace(
                kept=partial(self.kept, queries[block.queries], keys[block.keys])
            )
            for block in self.mask.blocks(query_rank, key_rank)
        )

    def kept(
        self, queries: Tensor, keys: Tensor, rows: slice, columns: slice
    ) -> Tensor:
        """The factors of a tile of a block with these positions."""
        return self.factors(queries[rows], keys[columns])


def inside(outer: slice, part: slice) -> slice:
    """`part` counts from the start of `outer`; the same tokens, counted from 0."""
    return slice(outer.start + part.start, outer.start + part.stop)
