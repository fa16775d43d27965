"""Dropout of attention's probabilities on context ranks, which never hold them all.

    probability of row b, head n, query s, key t of the whole batch
    random number   hash(key, ((b N + n) S + s) S + t)      drop if it is below p

The mask is a function of the place in the whole tensor [B, N, S, S], as that of
`xtrain.tensor_parallel.dropout` is, so that it is the same for any number of context
and tensor ranks and any balance. Each rank computes the part that belongs to a tile of
its queries, in forward and again in backward: nothing is sent, nothing is kept.

Shapes: B batch, N query heads, K key heads, S whole sequence, T keys of a tile, D head
size.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.batch_rows import FIRST_ROW
from xtrain.comm.checks import rank_and_size
from xtrain.tensor_parallel.dropout import STEP, draw_key, hash_in_place, shift_right


class ContextDropout(nn.Module):
    """The attention of context ranks, which drops probabilities while training.

    Args:
        p: the probability, below 1, that an attention probability becomes 0.
        attend: of context ranks, as `SequenceCut.attend`.
        size: of the context group.
        group: the tensor ranks, each with its slice of the heads; None for all heads.
    """

    def __init__(
        self,
        p: float,
        attend: Callable[..., Tensor],
        size: int,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.p, self.attend, self.size, self.group = p, attend, size, group

    def forward(self, q_BNSD: Tensor, *kv: Tensor, **options: Any) -> Tensor:
        """Attention of this rank's tokens; every call while training draws a key."""
        if not self.training or self.p == 0:
            return self.attend(q_BNSD, *kv, **options)
        rank, ranks = (0, 1) if self.group is None else rank_and_size(self.group)
        heads, length = q_BNSD.shape[1] * ranks, q_BNSD.shape[2] * self.size
        dropout = Places(self.p, draw_key(), q_BNSD, rank, heads, length)
        return self.attend(q_BNSD, *kv, dropout=dropout, **options)


class Places:
    """The factors of probabilities by their places in a layer's whole tensor.

    Args:
        key: of this layer in this step.
        q_BNSD: of this rank. Its first row is `FIRST_ROW` of the step's batch.
        rank: of the tensor group, which cuts all `heads`.
        length: of the whole sequence.
    """

    def __init__(
        self, p: float, key: int, q_BNSD: Tensor, rank: int, heads: int, length: int
    ):
        self.p, self.key, self.heads, self.length = p, key, heads, length
        self.rows, self.first_row = len(q_BNSD), FIRST_ROW.get()
        self.first_head, self.device = rank * q_BNSD.shape[1], q_BNSD.device
        self.dtype = torch.promote_types(q_BNSD.dtype, torch.float32)

    def __call__(self, heads: slice, queries: Tensor, keys: Tensor) -> Tensor:
        """0 or 1 / (1 - p), [rows, heads, queries, keys], in at least fp32.

        Args:
            heads: a slice of this rank's.
            queries, keys: their positions in the whole sequence.
        """
        queries, keys = queries.to(self.device), keys.to(self.device)
        row = self.first_row + torch.arange(self.rows, device=self.device)
        head = torch.arange(heads.start, heads.stop, device=self.device)
        place = (
            row.view(-1, 1, 1, 1) * self.heads + (self.first_head + head)[:, None, None]
        )
        place = (place * self.length + queries.unsqueeze(-1)) * self.length + keys
        number = shift_right(hash_in_place(place.mul_(STEP).add_(self.key)), 32)
        return (number >= round(self.p * 2**32)).to(self.dtype) / (1 - self.p)
