"""Embeddings cut over the ranks of a group: by vocabulary, or by hidden size.

    vocabulary   rank r holds rows [r V / N, (r + 1) V / N): it looks up the ids that
                 are its own, leaves zeros for the others, and the sum over ranks is
                 the result, because every id has exactly one owner
    hidden       rank r holds H / N columns of every row: it looks up all ids, and an
                 all-gather puts the columns together

By vocabulary sends an all-reduce of [B, S, H] forward and nothing backward; by hidden
sends half of that, but leaves the head, which is cut by vocabulary, nothing to share.

Source: Shoeybi et al., Megatron-LM, 2019.

Shapes: B batch, S sequence, H hidden, V vocabulary, N ranks.
"""

from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import (
    all_gather_split,
    all_reduce_identity,
    reduce_scatter_all_gather,
)
from xtrain.comm.checks import rank_and_size
from xtrain.tensor_parallel.shards import (
    check_ids,
    copy_shard,
    placed_as,
    share,
    weight_of,
)


class ShardedEmbedding(nn.Module):
    """What both share: a table [V, H] of which a rank holds a slice of `dim`.

    Built directly it draws the full table from torch's generator, as `nn.Embedding`
    would, and keeps its slice, so all ranks need the same seed.
    """

    dim: int

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
        group: ProcessGroup | None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.group = group
        shape = [num_embeddings, embedding_dim]
        what = ("num_embeddings", "embedding_dim")[self.dim]
        shape[self.dim] = share(what, shape[self.dim], group)
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    @classmethod
    def from_full(
        cls, full: nn.Module | Tensor, group: ProcessGroup | None = None, **options: Any
    ) -> Self:
        """An embedding whose shard is a slice of `full`, a module or its weight."""
        weight = weight_of(full)
        options |= placed_as(weight) | {"group": group}
        layer = cls(weight.shape[0], weight.shape[1], **options)
        copy_shard(layer.weight, weight, cls.dim, group)
        return layer

    def reset_parameters(self) -> None:
        """Draw the full table as `nn.Embedding` does, and keep this rank's slice."""
        if not self.weight.is_meta:
            sizes = self.num_embeddings, self.embedding_dim
            full = nn.Embedding(*sizes, **placed_as(self.weight))
            copy_shard(self.weight, full.weight, self.dim, self.group)


class VocabParallelEmbedding(ShardedEmbedding):
    """An embedding of which each rank holds its share of the rows.

    Args:
        num_embeddings: V, of the full table; a multiple of the group's size.
        embedding_dim: H.
        sequence_parallel: return this rank's slice of the sequence (dim -2) instead of
            the whole, so that the sum is a reduce-scatter.

    Shapes: ids [...], whole on every rank, to [..., H].
    """

    dim = 0

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        sequence_parallel: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, device, dtype, group)
        self.sequence_parallel = sequence_parallel
        self.first = rank_and_size(group)[0] * len(self.weight)

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings)
        local = ids - self.first
        others = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(others, 0), self.weight)
        partial = rows.masked_fill(others.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_all_gather(partial, -2, self.group)
        return all_reduce_identity(partial, self.group)


class HiddenParallelEmbedding(ShardedEmbedding):
    """An embedding of which each rank holds its share of the columns.

    Args:
        num_embeddings: V.
        embedding_dim: H, of the full table; a multiple of the group's size.
        gather_output: False returns this rank's H / N columns.

    Shapes: ids [...], whole on every rank, to [..., H].
    """

    dim = 1

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        gather_output: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__(num_embeddings, embedding_dim, device, dtype, group)
        self.gather_output = gather_output

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings)
        columns = F.embedding(ids, self.weight)
        if not self.gather_output:
            return columns
        return all_gather_split(columns, -1, self.group)
