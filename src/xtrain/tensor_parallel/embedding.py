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


class VocabParallelEmbedding(nn.Module):
    """An embedding of which each rank holds its share of the rows.

    Args:
        num_embeddings: V, of the full table; a multiple of the group's size.
        embedding_dim: H.
        sequence_parallel: return this rank's slice of the sequence (dim -2) instead of
            the whole, so that the sum is a reduce-scatter.

    Shapes: ids [...], whole on every rank, to [..., H].
    """

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
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel, self.group = sequence_parallel, group
        rows = share("num_embeddings", num_embeddings, group)
        self.first = rank_and_size(group)[0] * rows
        empty = torch.empty(rows, embedding_dim, device=device, dtype=dtype)
        self.weight = nn.Parameter(empty)
        self.reset_parameters()

    @classmethod
    def from_full(
        cls, full: nn.Module | Tensor, group: ProcessGroup | None = None, **options: Any
    ) -> Self:
        """An embedding whose shard is a slice of `full`, a module or its weight."""
        weight = weight_of(full)
        layer = cls(
            weight.shape[0],
            weight.shape[1],
            **placed_as(weight),
            **options,
            group=group,
        )
        copy_shard(layer.weight, weight, 0, group)
        return layer

    def reset_parameters(self) -> None:
        """Draw the full table as `nn.Embedding` does, and keep this rank's rows."""
        if not self.weight.is_meta:
            full = nn.Embedding(
                self.num_embeddings, self.embedding_dim, **placed_as(self.weight)
            )
            copy_shard(self.weight, full.weight, 0, self.group)

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings)
        local = ids - self.first
        others = (local < 0) | (local >= len(self.weight))
        rows = F.embedding(local.masked_fill(others, 0), self.weight)
        partial = rows.masked_fill(others.unsqueeze(-1), 0.0)
        if self.sequence_parallel:
            return reduce_scatter_all_gather(partial, -2, self.group)
        return all_reduce_identity(partial, self.group)


class HiddenParallelEmbedding(nn.Module):
    """An embedding of which each rank holds its share of the columns.

    Args:
        num_embeddings: V.
        embedding_dim: H, of the full table; a multiple of the group's size.
        gather_output: False returns this rank's H / N columns.

    Shapes: ids [...], whole on every rank, to [..., H].
    """

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
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.gather_output, self.group = gather_output, group
        columns = share("embedding_dim", embedding_dim, group)
        empty = torch.empty(num_embeddings, columns, device=device, dtype=dtype)
        self.weight = nn.Parameter(empty)
        self.reset_parameters()

    @classmethod
    def from_full(
        cls, full: nn.Module | Tensor, group: ProcessGroup | None = None, **options: Any
    ) -> Self:
        """An embedding whose shard is a slice of `full`, a module or its weight."""
        weight = weight_of(full)
        layer = cls(
            weight.shape[0],
            weight.shape[1],
            **placed_as(weight),
            **options,
            group=group,
        )
        copy_shard(layer.weight, weight, 1, group)
        return layer

    def reset_parameters(self) -> None:
        """Draw the full table as `nn.Embedding` does, and keep this rank's columns."""
        if not self.weight.is_meta:
            full = nn.Embedding(
                self.num_embeddings, self.embedding_dim, **placed_as(self.weight)
            )
            copy_shard(self.weight, full.weight, 1, self.group)

    def forward(self, ids: Tensor) -> Tensor:
        check_ids(ids, self.num_embeddings)
        columns = F.embedding(ids, self.weight)
        if not self.gather_output:
            return columns
        return all_gather_split(columns, -1, self.group)
