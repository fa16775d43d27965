"""Packed documents, each dealt out over all ranks: as much work on every rank.

    documents of 9 and 5 tokens     left over     zigzag         rank 0         rank 1
    0 .. 8 on 2 ranks               0             12 34 56 78    0  1 2  7 8    3 4  5 6
    9 .. 13                         9             10 11 12 13    10  13         9  11 12

Zigzag of the whole sequence gives a rank parts of some documents only. Here each one
is cut into 2N equal chunks, of which rank r has chunks r and 2N - 1 - r. What is left
over, fewer than 2N tokens, are the first of the document, whose queries see least. They
are dealt out one by one, forth and back, and the next document goes on where this one
ends: so all ranks have as many tokens, with documents of any lengths.
"""

import hashlib
from itertools import pairwise

import torch
from torch import Tensor


class Deal:
    """Which rank holds which tokens, in any order: a `balance` of one's own.

    Args:
        positions: [N, S / N], those of each rank; together each of 0 to S - 1 once.

    Raises:
        ValueError: they are not.
    """

    def __init__(self, positions: Tensor):
        whole = isinstance(positions, Tensor) and positions.dtype == torch.int64
        positions = positions.detach().cpu() if whole else positions
        if not whole or positions.dim() != 2 or not is_permutation(positions):
            raise ValueError(
                "a deal has the positions of each rank, [ranks, tokens of a rank], and "
                "together each of the sequence once"
            )
        self.positions = positions
        self._digest = hashlib.sha256(positions.numpy().tobytes()).hexdigest()[:12]

    def __repr__(self) -> str:  # what ranks compare
        ranks, tokens = self.positions.shape
        return f"Deal({ranks} x {tokens} tokens, {self._digest})"


def is_permutation(positions: Tensor) -> bool:
    """Whether these are 0, 1, 2 ... in some order."""
    in_order = positions.flatten().sort().values
    return torch.equal(in_order, torch.arange(len(in_order), device="cpu"))


def deal_documents(documents: Tensor, ranks: int) -> Deal:
    """The deal of a packed sequence, for `shard_sequence` and for attention.

    Args:
        documents: [S] or [B, S], whole, of all tokens. One deal serves all sequences of
            a batch: a document of any of them is cut where one of another begins.

    Raises:
        ValueError: S is not divisible by the ranks.
    """
    ids = documents.detach().cpu().reshape(-1, documents.shape[-1])
    length = ids.shape[1]
    if length % ranks:
        raise ValueError(
            f"a sequence of {length} cannot be dealt to {ranks} ranks evenly: pad it "
            f"to {length + -length % ranks}"
        )
    begins = (ids[:, 1:] != ids[:, :-1]).any(0).nonzero().flatten() + 1
    held: list[list[int]] = [[] for _ in range(ranks)]
    forth_and_back = [*range(ranks), *reversed(range(ranks))]
    turn = 0
    for start, stop in pairwise([0, *begins.tolist(), length]):
        chunk, left_over = divmod(stop - start, 2 * ranks)
        for position in range(start, start + left_over):
            held[forth_and_back[turn % (2 * ranks)]].append(position)
            turn += 1
        for rank, mine in enumerate(held):
            early = start + left_over + rank * chunk
            mine += range(early, early + chunk)
            mine += range(stop - (rank + 1) * chunk, stop - rank * chunk)
    return Deal(torch.tensor(held, device="cpu"))
