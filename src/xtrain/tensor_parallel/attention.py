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
exactly once (or the caller does, once a step). The gradient of x needs nothing more,
the one sum over all ranks includes every query once.

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
from xtrain.tensor_parallel.norm import ParallelRMSNorm, eps_of
from xtrain.tensor_parallel.rope import RopeScaling
from xtrain.tensor_parallel.rotary_attention import RotaryAttention
from xtrain.tensor_parallel.shards import (
    bare_weight,
    check_features,
    layer_of,
    placed_as,
    weight_of,
)


class ParallelAttention(RotaryAttention):
    """Rotary causal self-attention; query, key and value heads are cut over the ranks.

    Args:
        hidden_size: H, of input and output.
        num_attention_heads: N; a multiple of the group's size.
        num_key_value_heads: K; divides N. A multiple of the group's size, or it divides
            the group's size, and each key head is held by several ranks.
        head_dim: D.
        attention: called as `scaled_dot_product_attention` is, with this rank's heads,
            is_causal and enable_gqa, and with `window` and `documents` if given.
        qkv_bias: the projections of queries, keys and values have biases (Qwen2).
        qk_norm_eps: queries and keys have an RMSNorm over each head with this eps
            (Qwen3). Its weight is whole on every rank and has seen this rank's heads
            alone, so its gradient is summed over the ranks.
        window: a token sees itself and the `window - 1` before it (Mistral).
        sequence_parallel: input and output are this rank's slice of the sequence;
            attention itself sees the whole.
        overlap: as `ColumnParallelLinear`'s and `RowParallelLinear`'s.
        sum_gradients: sum those of shared key heads, and of norms, in backward; False
            leaves that to the caller.

    Shapes: x [B, S, H] in and out; positions [S] or [B, S] and documents [B, S], of the
    whole sequence.
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
        qkv_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        sequence_parallel: bool = False,
        overlap: Overlap = True,
        sum_gradients: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        group: ProcessGroup | None = None,
    ):
        super().__init__(head_dim, rope_theta, rope_scaling, attention, window)
        self.hidden_size, self.overlap, self.group = hidden_size, overlap, group
        self.sum_gradients = sum_gradients
        check_divides(
            "num_attention_heads for num_key_value_heads",
            num_attention_heads,
            num_key_value_heads,
        )
        size = rank_and_size(group)[1]
        check_divides("num_attention_heads", num_attention_heads, size)
        self.replicas = key_replicas(num_key_value_heads, size)
        self.replica_ranks = replica_ranks(num_key_value_heads, group)
        placed: dict[str, Any] = {"device": device, "dtype": dtype, "group": group}
        shared = {"sequence_parallel": sequence_parallel, "overlap": overlap} | placed
        queries = num_attention_heads * head_dim
        keys = num_key_value_heads * head_dim * self.replicas
        self.q_proj = ColumnParallelLinear(hidden_size, queries, qkv_bias, **shared)
        self.k_proj = ColumnParallelLinear(hidden_size, keys, qkv_bias, **shared)
        self.v_proj = ColumnParallelLinear(hidden_size, keys, qkv_bias, **shared)
        self.o_proj = RowParallelLinear(queries, hidden_size, False, **shared)
        if qk_norm_eps is not None:  # ranks have other heads, as others have tokens
            summed: dict[str, Any] = {"sum_gradients": sum_gradients} | placed
            summed["sequence_parallel"] = True
            self.q_norm = ParallelRMSNorm(head_dim, qk_norm_eps, **summed)
            self.k_norm = ParallelRMSNorm(head_dim, qk_norm_eps, **summed)
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
        """Shards of a module with `q_proj`, `k_proj`, `v_proj` and `o_proj`, and maybe
        with `q_norm` and `k_norm`.

        Args:
            head_dim: D; the module's own (or its config's) unless given.
        """
        config = getattr(full, "config", None)
        head_dim = head_dim or getattr(full, "head_dim", None)
        head_dim = head_dim or getattr(config, "head_dim", None)
        if not isinstance(head_dim, int):
            raise ValueError(f"{type(full).__name__} has no head_dim: pass it")
        for option, name in FROM_CONFIG.items():
            value = getattr(full, name, getattr(config, name, None))
            if value is not None:
                options.setdefault(option, value)
        layers = [layer_of(full, name) for name in ("q_proj", "k_proj", "v_proj")]
        query, key, _ = map(weight_of, layers)
        if (norm := getattr(full, "q_norm", None)) is not None:
            options.setdefault("qk_norm_eps", eps_of(norm))
        block = cls(
            query.shape[1],
            len(query) // head_dim,
            len(key) // head_dim,
            head_dim,
            **placed_as(query),
            qkv_bias=layers[0].bias is not None,
            **options,
            group=group,
        )
        block._load_full(full, layers)
        return block

    @torch.no_grad()
    def _load_full(self, full: nn.Module, layers: list[nn.Module]) -> None:
        """Take this rank's slices of the layers of `full`, and its norms."""
        if len({layer.bias is None for layer in layers}) > 1:
            raise ValueError("of q_proj, k_proj and v_proj some have a bias")
        own = self.q_proj, self.k_proj, self.v_proj
        copies = 1, self.replicas, self.replicas
        for layer, source, times in zip(own, layers, copies, strict=True):
            held = weight_of(source), source.bias
            found = (self._repeated(x, times) for x in held if isinstance(x, Tensor))
            layer.load_full(*found)
        self.o_proj.load_full(bare_weight(full, "o_proj"))
        for name in ("q_norm", "k_norm") if self.q_norm is not None else ():
            getattr(self, name).weight.copy_(layer_of(full, name).weight)

    def forward(
        self,
        x_BSH: Tensor,
        positions: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        check_features("ParallelAttention", x_BSH, self.hidden_size)
        keys_and_values = map(self._summed, (self.k_proj.weight, self.v_proj.weight))
        q, k, v = column_linear(
            x_BSH,
            [self.q_proj.weight, *keys_and_values],
            self.q_proj.sequence_dim,
            self.overlap,
            self.group,
        )
        of_q, of_k, of_v = self.q_proj.bias, self.k_proj.bias, self.v_proj.bias
        if of_q is not None and of_k is not None and of_v is not None:
            q = q + of_q.to(q.dtype)
            k = k + self._summed(of_k).to(k.dtype)
            v = v + self._summed(of_v).to(v.dtype)
        return self.o_proj(self.attend(q, k, v, positions, documents))

    def _summed(self, weight: Tensor) -> Tensor:
        """Keys' or values': backward sums its gradients over the replicas."""
        if self.replicas == 1 or not self.sum_gradients:
            return weight
        return identity_sum(weight, self.replica_ranks, self.group)

    def _repeated(self, full: Tensor, copies: int) -> Tensor:
        """The heads [K D, ...], each as often as it has replicas, in rank order."""
        heads = full.detach().unflatten(0, (-1, self.head_dim))
        return heads.repeat_interleave(copies, 0).flatten(0, 1)

    def _draw_keys_once(self, num_key_value_heads: int) -> None:
        """Replicas begin equal: their heads are drawn once each."""
        if self.replicas == 1 or self.k_proj.weight.is_meta:
            return
        rows = num_key_value_heads * self.head_dim
        for layer in (self.k_proj, self.v_proj):
            bias, placed = layer.bias is not None, placed_as(layer.weight)
            full = nn.Linear(self.hidden_size, rows, bias, **placed)
            drawn = [self._repeated(x, self.replicas) for x in full.parameters()]
            layer.load_full(*drawn)


FROM_CONFIG = {
    "rope_theta": "rope_theta",
    "rope_scaling": "rope_scaling",
    "window": "sliding_window",
}
"""Options of a layer, by their names in a module or in its config."""


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
