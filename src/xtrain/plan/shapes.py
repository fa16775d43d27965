"""The sizes of a decoder, and what follows from them: parameters and FLOPs.

    embedding   V h              V vocabulary     h hidden size      L layers
    a layer     2 h a d          a query heads    d head size        (q and o)
                2 h k d          k key/value heads                   (k and v)
                3 h f            f intermediate size                 (gate, up, down)
                                 or experts: see xtrain.plan.expert_sizes
                2 h              two norms
                (a + 2 k) d     biases of q, k and v             where there are any
                2 d             norms of queries and keys        where there are any
    last norm   h
    head        V h              nothing where it is tied to the embedding

A matrix of n elements takes 2 n FLOPs per token in forward and 4 n in backward. The
embedding is looked up, so it takes none. Attention adds 4 a d FLOPs for each pair of
positions in forward, and twice that in backward. Only the
experts of a token count.

Sources: Touvron et al., Llama 2, 2023, Grattafiori et al., The Llama 3 Herd of Models,
2024, and Jiang et al., Mixtral of Experts, 2024 (sizes); Chowdhery et al., PaLM, 2022,
appendix B (FLOPs).
"""

from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, ClassVar, Self

from xtrain.plan.checks import require_whole, shown
from xtrain.plan.expert_sizes import ExpertSizes


@dataclass(frozen=True, kw_only=True)
class ModelShape(ExpertSizes):
    """Sizes of a Llama-style decoder, under the names of its `config.json`.

    Sizes are those of the whole model, however it is distributed. It is dense unless
    the sizes of `ExpertSizes` are given.
    """

    mlp_matrices: ClassVar[int] = 3
    """Of a layer without experts: gate, up and down."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int = None  # type: ignore[assignment]
    """As many as query heads unless given."""
    head_dim: int = None  # type: ignore[assignment]
    """hidden_size / num_attention_heads unless given."""
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    """The projections of queries, keys and values have biases, as Qwen2's have."""
    qk_norm: bool = False
    """Queries and keys have a norm over each head, as Qwen3's have."""

    def __post_init__(self) -> None:
        given = vars(self)
        if given["num_key_value_heads"] is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name in SIZES:
            require_whole(name, getattr(self, name))
        if self.num_hidden_layers > MOST_LAYERS:
            raise ValueError(
                f"num_hidden_layers={self.num_hidden_layers} is above {MOST_LAYERS}: "
                f"layers are counted one by one"
            )
        hidden, queries = self.hidden_size, self.num_attention_heads
        if given["head_dim"] is None:
            if hidden % queries:
                raise ValueError(
                    f"hidden_size={hidden} is not a multiple of "
                    f"num_attention_heads={queries}: give head_dim"
                )
            object.__setattr__(self, "head_dim", hidden // queries)
        require_whole("head_dim", self.head_dim)
        if queries % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads={queries} is not a multiple of "
                f"num_key_value_heads={self.num_key_value_heads}: as many query heads "
                f"share each of them"
            )
        for name in ("tie_word_embeddings", "qkv_bias", "qk_norm"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name}={getattr(self, name)!r} is not a bool")
        self.check_experts(self.intermediate_size, self.num_hidden_layers)

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer's parameters; of one with experts, if there are any."""
        return self.parameters_of_layer(self.num_hidden_layers - 1)

    def parameters_of_layer(self, layer: int) -> int:
        """Elements of the parameters of the layer with this number."""
        matrices = self._layer_matrices(layer, self.num_local_experts)
        return matrices + self.vectors_of_layer(layer)

    def vectors_of_layer(self, layer: int) -> int:
        """Elements of a layer's vectors: norms, and biases."""
        heads = self.num_attention_heads + 2 * self.num_key_value_heads
        biases = heads * self.head_dim if self.qkv_bias else 0
        return self._norms_of_layer() + biases

    def _norms_of_layer(self) -> int:
        return 2 * (self.hidden_size + (self.head_dim if self.qk_norm else 0))

    def replicated_of_layer(self, layer: int) -> int:
        """Elements that every tensor rank holds whole: norms, and a router."""
        router = self.num_local_experts if self.is_moe(layer) else 0
        return self._norms_of_layer() + router * self.hidden_size

    def experts_of_layer(self, layer: int) -> int:
        """Elements of a layer's routed experts, all of them."""
        inner = (self.moe_intermediate_size or 0) if self.is_moe(layer) else 0
        return self.num_local_experts * 3 * self.hidden_size * inner

    def matrices_met_in_layer(self, layer: int) -> int:
        """Elements of a layer's matrices that one token is multiplied with."""
        return self._layer_matrices(layer, self.num_experts_per_tok)

    @property
    def last_norm(self) -> int:
        """Elements of the norm before the head."""
        return self.hidden_size

    @property
    def position_table(self) -> int:
        """Elements of learned positions: none, as rotary positions are computed."""
        return 0

    @property
    def parameters(self) -> int:
        """Elements of all parameters; a tied head counts once."""
        return self._parameters(self.num_local_experts)

    @property
    def active_parameters(self) -> int:
        """Elements that one token uses: all of them, where the model is dense."""
        return self._parameters(self.num_experts_per_tok)

    def flops_per_token(self, sequence: int, causal: bool = False) -> int:
        """FLOPs of forward and backward per token of sequences of `sequence` tokens.

        Only matrix products count. By default attention counts all pairs of positions,
        as most papers do; with `causal` only those that the mask leaves.
        """
        head = 6 * self.vocab_size * self.hidden_size
        layers = range(self.num_hidden_layers)
        return head + sum(
            self.layer_flops_per_token(layer, sequence, causal) for layer in layers
        )

    def layer_flops_per_token(
        self, layer: int, sequence: int, causal: bool = False
    ) -> int:
        """The same, of the layer with this number."""
        require_whole("sequence", sequence)
        matrices = self._layer_matrices(layer, self.num_experts_per_tok)
        # Pairs per token, doubled: the mask leaves (sequence + 1) / 2 of them.
        pairs = sequence + 1 if causal else 2 * sequence
        attention = self.attention_width * pairs
        return 3 * (2 * matrices + attention)

    @property
    def attention_width(self) -> int:
        """Multiply-adds of a pair of positions: its score, and its share of values."""
        return 2 * self.num_attention_heads * self.head_dim

    def _parameters(self, experts: int) -> int:
        """Elements of everything, with so many experts a layer."""
        tables = 1 if self.tie_word_embeddings else 2
        total = tables * self.vocab_size * self.hidden_size + self.position_table
        layers = range(self.num_hidden_layers)
        total += sum(self.vectors_of_layer(layer) for layer in layers)
        return total + self.last_norm + self._matrices(experts)

    def _matrices(self, experts: int) -> int:
        """Of all layers."""
        layers = range(self.num_hidden_layers)
        return sum(self._layer_matrices(layer, experts) for layer in layers)

    def _layer_matrices(self, layer: int, experts: int) -> int:
        if self.is_moe(layer):
            inner = self.moe_intermediate_size or 0
            width = self.num_local_experts  # the router
            width += 3 * (experts + self.n_shared_experts) * inner
        else:
            width = self.mlp_matrices * self.intermediate_size
        return self._attention_matrices() + self.hidden_size * width

    def _attention_matrices(self) -> int:
        heads = self.num_attention_heads + self.num_key_value_heads
        return 2 * heads * self.head_dim * self.hidden_size

    def attention_products(self, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """(inner, outer) of attention's matrices on one of `ranks` tensor ranks."""
        queries = -(-self.num_attention_heads // ranks)
        keys = -(-self.num_key_value_heads // ranks)
        hidden, head = self.hidden_size, self.head_dim
        return (hidden, (queries + 2 * keys) * head), (queries * head, hidden)

    def recomputed_products(self, ranks: int = 1) -> tuple[tuple[int, int], ...]:
        """Those that selective recomputation computes again: none here."""
        return ()

    def mlp_products(self, inner: float) -> tuple[tuple[float, float], ...]:
        """(inner, outer) of an MLP's matrices; gate and up are one product."""
        wide = (self.mlp_matrices - 1) * inner
        return (self.hidden_size, wide), (inner, self.hidden_size)

    @classmethod
    def preset(cls, name: str) -> Self:
        """The shape of a published model; ValueError names those that are known."""
        others = OTHERS if cls is ModelShape else {}
        if name in others:
            return others[name]  # type: ignore[return-value]
        if name not in PRESETS:
            known = sorted([*PRESETS, *others])
            near = get_close_matches(str(name).lower(), known, 3)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise ValueError(f"preset {shown(name)}: there are {known}{hint}")
        sizes: dict[str, Any] = dict(zip(SIZES, PRESETS[name], strict=True))
        return cls(**sizes, **EXPERTS.get(name, {}))


MOST_LAYERS = 10_000
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads")  # fmt: skip


PRESETS = {  # in the order of SIZES
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32),
    "llama-2-70b": (32000, 8192, 28672, 80, 64, 8),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8),
    "llama-3-70b": (128256, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": (128256, 16384, 53248, 126, 128, 8),
    "mixtral-8x7b": (32000, 4096, 14336, 32, 32, 8),
}
EXPERTS: dict[str, dict[str, Any]] = {
    "mixtral-8x7b": {"num_local_experts": 8, "num_experts_per_tok": 2}
}
OTHERS: dict[str, ModelShape] = {}
"""Shapes of other kinds, which build on this one: `xtrain.plan.published` adds them."""
