"""The sizes of a decoder, and what follows from them: parameters and FLOPs.

    embedding   V h              V vocabulary     h hidden size      L layers
    a layer     2 h a d          a query heads    d head size        (q and o)
                2 h k d          k key/value heads                   (k and v)
                3 h f            f intermediate size                 (gate, up, down)
                2 h              two norms
    last norm   h
    head        V h              nothing where it is tied to the embedding

A matrix of n elements takes 2 n FLOPs per token in forward and 4 n in backward. The
embedding is looked up, so it takes none. Attention adds 4 a d FLOPs for each pair of
positions in forward, and twice that in backward.

Sources: Touvron et al., Llama 2, 2023, and Grattafiori et al., The Llama 3 Herd of
Models, 2024 (sizes); Chowdhery et al., PaLM, 2022, appendix B (FLOPs).
"""

import math
from dataclasses import dataclass
from typing import Any, Self


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a dense Llama-style decoder, under the names of its `config.json`.

    Sizes are those of the whole model, however it is distributed.
    """

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

    def __post_init__(self) -> None:
        given = vars(self)
        if given["num_key_value_heads"] is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name in SIZES:
            require_whole(name, getattr(self, name))
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
        if not isinstance(self.tie_word_embeddings, bool):
            raise ValueError(
                f"tie_word_embeddings={self.tie_word_embeddings!r} is not a bool"
            )

    @property
    def layer_parameters(self) -> int:
        """Elements of one layer's parameters."""
        return self._layer_matrices + 2 * self.hidden_size

    @property
    def parameters(self) -> int:
        """Elements of all parameters; a tied head counts once."""
        tables = 1 if self.tie_word_embeddings else 2
        return (
            tables * self.vocab_size * self.hidden_size
            + self.num_hidden_layers * self.layer_parameters
            + self.hidden_size
        )

    @property
    def active_parameters(self) -> int:
        """Elements that one token meets: all of them, as the model is dense."""
        return self.parameters

    def flops_per_token(self, sequence: int, causal: bool = False) -> int:
        """FLOPs of forward and backward per token of sequences of `sequence` tokens.

        Only matrix products count. By default attention counts all pairs of positions,
        as most papers do; with `causal` only those that the mask leaves.
        """
        require_whole("sequence", sequence)
        matrices = self.num_hidden_layers * self._layer_matrices
        matrices += self.vocab_size * self.hidden_size
        # Pairs per token, doubled: the mask leaves (sequence + 1) / 2 of them.
        pairs = sequence + 1 if causal else 2 * sequence
        attention = 2 * self.num_attention_heads * self.head_dim * pairs
        return 3 * (2 * matrices + self.num_hidden_layers * attention)

    @property
    def _layer_matrices(self) -> int:
        heads = self.num_attention_heads + self.num_key_value_heads
        width = 2 * heads * self.head_dim + 3 * self.intermediate_size
        return self.hidden_size * width

    @classmethod
    def preset(cls, name: str) -> Self:
        """The shape of a published model; ValueError names those that are known."""
        if name not in PRESETS:
            raise ValueError(f"preset {name!r}: there are {sorted(PRESETS)}")
        sizes: dict[str, Any] = dict(zip(SIZES, PRESETS[name], strict=True))
        return cls(**sizes)


SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
         "num_attention_heads", "num_key_value_heads")  # fmt: skip


def require_positive(name: str, value: object) -> None:
    """ValueError unless `value` is a finite number above zero."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} is not a finite number above 0")


def require_whole(name: str, value: object, least: int = 1) -> None:
    """ValueError unless `value` is an int, and not below `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name}={value!r} is not an int of at least {least}")


PRESETS = {  # in the order of SIZES
    "llama-2-7b": (32000, 4096, 11008, 32, 32, 32),
    "llama-2-70b": (32000, 8192, 28672, 80, 64, 8),
    "llama-3-8b": (128256, 4096, 14336, 32, 32, 8),
    "llama-3-70b": (128256, 8192, 28672, 80, 64, 8),
    "llama-3.1-405b": (128256, 16384, 53248, 126, 128, 8),
}
