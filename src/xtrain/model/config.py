"""What a model is made of: its sizes, and the constants of its positions and norms.

Fields are named as in the `config.json` of a Llama checkpoint.
"""

import math
from dataclasses import dataclass

from xtrain.plan import ModelShape
from xtrain.plan.shapes import require_whole


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How Llama 3.1 stretches rotary positions (rope_type llama3).

    Args:
        factor: how many times slower the slow frequencies turn.
        low_freq_factor: what turns at most this often in the original length is slow.
        high_freq_factor: what turns at least this often in it stays as it is.
        original_max_position_embeddings: the sequence length before stretching.
    """

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self) -> None:
        for name in ("factor", "low_freq_factor", "high_freq_factor"):
            require_positive(name, getattr(self, name))
        require_whole(
            "original_max_position_embeddings", self.original_max_position_embeddings
        )
        if not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor={self.low_freq_factor} is not below "
                f"high_freq_factor={self.high_freq_factor}"
            )


@dataclass(frozen=True, kw_only=True)
class XtrainConfig(ModelShape):
    """The sizes of `ModelShape`, and what else makes up an `XtrainModel`.

    Args:
        rope_theta: the base of the rotary frequencies.
        rope_scaling: None for plain rotary positions.
        rms_norm_eps: keeps a norm from dividing by zero.
        initializer_range: the standard deviation of all matrices at the start.
        seed: of the weights; each parameter's own seed is made of it and its name.
    """

    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    rms_norm_eps: float = 1e-5
    initializer_range: float = 0.02
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim % 2:
            raise ValueError(
                f"head_dim={self.head_dim} is odd: rotary positions turn pairs"
            )
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            require_positive(name, getattr(self, name))
        require_whole("seed", self.seed, least=0)
        if not isinstance(self.rope_scaling, RopeScaling | None):
            raise ValueError(
                f"rope_scaling={self.rope_scaling!r} is neither RopeScaling nor None"
            )


def require_positive(name: str, value: object) -> None:
    """ValueError unless `value` is a finite number above zero."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:  # type: ignore[operator]
        raise ValueError(f"{name}={value!r} is not a finite number above 0")
