"""The page on compute math: MFU as published sources count it."""

from xtrain.plan import ModelShape, attention_flops, utilization

from ...values import value
from .common import playbook_shape


@value
def paper_mfu(
    shape: ModelShape, parameters: float, sequence: int, tokens: float, gpus: int,
    peak: float,
) -> float:  # fmt: skip
    """MFU by tokens a second: parameters as the paper counts them, and all pairs."""
    per_token = 6 * parameters + 3 * attention_flops(shape, sequence)
    return utilization(tokens * per_token, 1.0, gpus, peak)


@value
def playbook_mfu(
    layers: int, h: int, inner: int, tokens: float, tied: bool = False
) -> float:
    """As the Playbook's benchmarks count, of its sequences of 4096 tokens."""
    shape = playbook_shape(layers, h, inner, tied)
    return paper_mfu(shape, shape.parameters, 4096, tokens, 1, 989.5e12)
