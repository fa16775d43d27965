"""Causal attention with its heads cut over the ranks of a group.

    x replicated -> q, k, v: columns, whole heads -> attention over this rank's heads
    -> o: rows, summed over ranks

Each rank has N / t of the N query heads and the key heads that they use. With more
ranks than key heads, t / K ranks hold the same key head (and value head):

    N = 8, K = 2, t = 4     rank    query heads    key head
                            0       0 1            0
                            1       2 3            0
                            2       4 5            1
                            3       6 7            1

A replica's weight gradient comes from its own queries only. The true gradient is their
sum over the replicas: f on the weight, among the ranks with the same head, adds them up
exactly once. The gradient of x needs nothing more, the one sum over all ranks
includes every query once.

Sources: Shoeybi et al., Megatron-LM, 2019; Ainslie et al., GQA, 2023.

Shapes: B batch, S sequence, H hidden, N query heads, K key/value heads, D head size,
t ranks.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import check_divides, identity_sum
from xtrain.comm.checks import rank_and_size
from xtrain.tensor_parallel.functions import Overlap, column_linear
from xtrain.tensor_parallel.linear import ColumnParallelLinear, RowParallelLinear
from xtrain.tensor_parallel.rope import RopeScaling, apply_rotary, rope_cos_sin
from xtrain.tensor_parallel.shards import bare_weight, check_features, placed_as


class ParallelAttention(nn.Module):
    """Rotary causal self-attention; query, key and value heads are cut over the ranks.

    Args:
        hidden_size: H, of input and output.
        num_attention_heads: N; a multiple of the group's size.
        num_key_value_heads: K; divides N. A multiple of the group's size, or it divides
            the group's size, and each key head is held by several ranks.
        head_dim: D.
        attention: called as `scaled_dot_product_attention` is, with this rank's heads,
            is_causal and enable_gqa.
        sequence_parallel: input and output are this rank's slice of the sequence;
            attention itself sees the whole.
        overlap: as `ColumnParallelLinear`'s and `RowParallelLinear`'s.

    Shapes: x [B, S, H] in and out; positions [S] or [B, S], of the whole sequence.
    """

    def __init__(
        self,
        hidden_size: int,
        num_attention_heads: int,
        num_key_value_heads: int,
        head_dim: int,
        *,
        rope_theta: float = 10_000.0,
        rope_scaling: RopeScaling | None = None,
        attention: Callable[..., Tensor] = F.scaled_dot_product_attention,
        sequence_parallel: bool = False,
        overlap: Overlap = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__()
        self.hidden_size, self.head_dim = hidden_size, head_dim
        self.rope_theta, self.rope_scaling = rope_theta, rope_scaling
        self.attention, self.overlap, self.group = attention, overlap, group
        check_divides(
            "num_attention_heads for num_key_value_heads",
            num_attention_heads,
            num_key_value_heads,
        )
        size = rank_and_size(group)[1]
        check_divides("num_attention_heads", num_attention_heads, size)
        self.replicas = key_replicas(num_key_value_heads, size)
        self.replica_ranks = replica_ranks(num_key_value_heads, group)
        shared: dict[str, Any] = {
            "bias": False,
            "sequence_parallel": sequence_parallel,
            "overlap": overlap,
            "device": device,
            "dtype": dtype,
            "group": group,
        }
        queries = num_attention_heads * head_dim
        keys = num_key_value_heads * head_dim * self.replicas
        self.q_proj = ColumnParallelLinear(hidden_size, queries, **shared)
        self.k_proj = ColumnParallelLinear(hidden_size, keys, **shared)
        self.v_proj = ColumnParallelLinear(hidden_size, keys, **shared)
        self.o_proj = RowParallelLinear(queries, hidden_size, **shared)
        self._draw_keys_once(num_key_value_heads)

    @classmethod
    def from_full(
        cls,
        full: nn.Module,
        group: ProcessGroup | None = None,
        *,
        head_dim: int | None = None,
        **options: Any,
    ) -> Self:
        """Shards of a module with `q_proj`, `k_proj`, `v_proj` and `o_proj`.

        Args:
            head_dim: D; the module's own (or its config's) unless given.
        """
        config = getattr(full, "config", None)
        head_dim = head_dim or getattr(full, "head_dim", None)
        head_dim = head_dim or getattr(config, "head_dim", None)
        if not isinstance(head_dim, int):
            raise ValueError(f"{type(full).__name__} has no head_dim: pass it")
        for name in ("rope_theta", "rope_scaling"):
            if hasattr(config, name):
                options.setdefault(name, getattr(config, name))
        query, key = bare_weight(full, "q_proj"), bare_weight(full, "k_proj")
        block = cls(
            query.shape[1],
            len(query) // head_dim,
            len(key) // head_dim,
            head_dim,
            **placed_as(query),
            **options,
            group=group,
        )
        block.q_proj.load_full(query)
        block.k_proj.load_full(block._repeated(key))
        block.v_proj.load_full(block._repeated(bare_weight(full, "v_proj")))
        block.o_proj.load_full(bare_weight(full, "o_proj"))
        return block

    def forward(self, x_BSH: Tensor, positions: Tensor | None = None) -> Tensor:
        check_features("ParallelAttention", x_BSH, self.hidden_size)
        keys_and_values: list[Tensor] = [self.k_proj.weight, self.v_proj.weight]
        if self.replicas > 1:
            keys_and_values = [
                identity_sum(weight, self.replica_ranks, self.group)
                for weight in keys_and_values
            ]
        q, k, v = column_linear(
            x_BSH,
            [self.q_proj.weight, *keys_and_values],
            self.q_proj.sequence_dim,
            self.overlap,
            self.group,
        )
        if positions is None:
            positions = torch.arange(q.shape[1], device=q.device)
        cos, sin = self._angles(positions, q.dtype)
        out_BNSD = self.attention(
            apply_rotary(self._split_heads(q), cos, sin),
            apply_rotary(self._split_heads(k), cos, sin),
            self._split_heads(v),
            is_causal=True,
            enable_gqa=True,
        )
        return self.o_proj(out_BNSD.transpose(1, 2).flatten(2))

    def _split_heads(self, x: Tensor) -> Tensor:
        """[B, S, heads * D] -> [B, heads, S, D]"""
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def _angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """At least fp32: 16 bits round large positions to the same number."""
        wide = torch.promote_types(dtype, torch.float32)
        return rope_cos_sin(
            positions, self.head_dim, self.rope_theta, self.rope_scaling, wide
        )

    def _repeated(self, full: Tensor) -> Tensor:
        """The key heads [K D, H], each as often as it has replicas, in rank order."""
        heads = full.detach().unflatten(0, (-1, self.head_dim))
        return heads.repeat_interleave(self.replicas, 0).flatten(0, 1)

    def _draw_keys_once(self, num_key_value_heads: int) -> None:
        """Replicas begin equal: their heads are drawn once each."""
        if self.replicas == 1 or self.k_proj.weight.is_meta:
            return
        rows = num_key_value_heads * self.head_dim
        for layer in (self.k_proj, self.v_proj):
            full = nn.Linear(
                self.hidden_size, rows, bias=False, **placed_as(layer.weight)
            )
            layer.load_full(self._repeated(full.weight))


def key_replicas(num_key_value_heads: int, size: int) -> int:
    """How many ranks hold each key head; 1 if there are enough heads for all ranks."""
    if num_key_value_heads % size == 0:
        return 1
    if size % num_key_value_heads:
        raise ValueError(
            f"{num_key_value_heads} key heads on {size} ranks: one number must divide "
            "the other"
        )
    return size // num_key_value_heads


def replica_ranks(
    num_key_value_heads: int, group: ProcessGroup | None = None
) -> list[int]:
    """The ranks of `group` with the same key heads as this one, itself included."""
    rank, size = rank_and_size(group)
    replicas = key_replicas(num_key_value_heads, size)
    first = rank // replicas * replicas
    return list(range(first, first + replicas))
