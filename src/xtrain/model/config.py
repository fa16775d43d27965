"""What a model is made of: its sizes, and the constants of its positions and norms.

Fields are named as in the `config.json` of a Llama checkpoint.
"""

from dataclasses import dataclass

from xtrain.plan import ModelShape
from xtrain.plan.checks import require_positive, require_whole
from xtrain.tensor_parallel.rope import RopeScaling


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
