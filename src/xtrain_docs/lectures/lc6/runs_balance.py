"""Runs of ring attention whose work is counted where it is done: in the blocks."""

from collections import Counter

import torch
from torch import Tensor

from xtrain.comm.checks import rank_and_size
from xtrain.context_parallel import ring_attention, shard_sequence
from xtrain.context_parallel.balance import positions_of
from xtrain.context_parallel.block_attention import TILES, BlockAttention


class Counted:
    """A block attention that counts the pairs of a query and a key it is given.

    The first number of a query, and of a key, is its position in the sequence: so it
    also sees whose keys they are, and that the mask is that of the whole sequence.
    """

    def __init__(self, balance: str, local: int):
        self.rank, self.size = rank_and_size(None)
        parts = [positions_of(r, self.size, local, balance) for r in range(self.size)]
        self.owner = {int(p): r for r, part in enumerate(parts) for p in part}
        self.forward: Counter[int] = Counter()
        self.backward: Counter[int] = Counter()
        self.seen: list[list[int]] = []

    def attention(self) -> BlockAttention:
        """`TILES` that are counted."""

        def forward(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float):
            self.note(self.forward, q, k, causal)
            self.seen += self.pairs(q, k, causal).tolist()
            return TILES.forward(q, k, v, causal, scale)

        def backward(grad: Tensor, q: Tensor, k: Tensor, *others):
            self.note(self.backward, q, k, others[-2])
            return TILES.backward(grad, q, k, *others)

        return BlockAttention(forward, backward)

    def note(self, counter: Counter[int], q: Tensor, k: Tensor, causal: bool) -> None:
        """Count the pairs of a block for the step of the ring that it belongs to."""
        owner = self.owner[int(k[0, 0, 0, 0])]
        step = (self.rank - owner) % self.size
        counter[step] += len(self.pairs(q, k, causal))

    def pairs(self, q: Tensor, k: Tensor, causal: bool) -> Tensor:
        """Positions of all queries and keys that the block's mask lets meet."""
        mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool)
        mask = mask.tril() if causal else mask
        rows, columns = mask.nonzero().unbind(1)
        queries, keys = q[0, 0, rows, 0].long(), k[0, 0, columns, 0].long()
        if (keys > queries).any():
            raise ValueError("a query sees a key that comes after it")
        return torch.stack([queries, keys], 1)

    def by_step(self, counter: Counter[int]) -> list[int]:
        return [counter[step] for step in range(self.size)]


def run(balance: str, tokens: int) -> Counted:
    """Forward and backward of causal ring attention over `tokens` of all ranks."""
    counted = Counted(balance, tokens // rank_and_size(None)[1])
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn(3, 1, 1, tokens, 4, generator=generator)
    whole[..., 0] = torch.arange(tokens)
    q, k, v = (shard_sequence(t, 2, balance).requires_grad_() for t in whole)
    out = ring_attention(
        q, k, v, True, balance, 0.01, block_attention=counted.attention()
    )
    out.sum().backward()
    return counted


def work(balance: str, tokens: int) -> list[list[int]]:
    """Pairs that this rank computed in each step: forward, and backward."""
    counted = run(balance, tokens)
    return [counted.by_step(c) for c in (counted.forward, counted.backward)]


def seen(balance: str, tokens: int) -> list[list[int]]:
    """Positions of the queries and keys that this rank let meet."""
    return run(balance, tokens).seen
