"""The page of worked scenarios: runs that are estimated, and what they would lose."""

from functools import lru_cache
from math import sqrt

from xtrain.plan import Estimate, Layout, ModelShape, estimate

from ...values import value

MODEL, SEQUENCE = "llama-3-70b", 8192
LOW_MFU = {
    "": (Layout(), {}),
    "recompute": (Layout(recompute="full"), {}),
    "unfused": (Layout(), {"attention": "unfused"}),
    "nodes": (Layout(tensor=16, data=2, micro_batches=256), {}),
    "few": (Layout(micro_batches=4), {}),
    "network": (Layout(), {"network": 25e9}),
}
"""What differs from the run whose MFU fell; sizes of 1 are as they were."""


def changed(part: Layout) -> Layout:
    """TP8 PP2 DP4 with ZeRO-1 on 64 devices, with what `part` has above 1."""
    return Layout(
        tensor=max(part.tensor, 8),
        pipeline=2,
        data=part.data if part.data > 1 else 4,
        zero=1,
        sequence_parallel=True,
        micro_batches=part.micro_batches if part.micro_batches > 1 else 128,
        recompute=part.recompute,
    )


@value
@lru_cache
def low_mfu(what: str = "") -> Estimate:
    """The 70B run on 64 H100, as it was or with one thing that went wrong."""
    part, assumed = LOW_MFU[what]
    shape = ModelShape.preset(MODEL)
    return estimate(shape, changed(part), "h100", SEQUENCE, **assumed)


@value
@lru_cache
def million_tokens(
    context: int, recompute: str = "selective", tokens: int = 2**20
) -> Estimate:
    """Llama 3 8B on one sequence and 8 tensor ranks, ZeRO-3 over the context ranks."""
    layout = Layout(
        tensor=8, context=context, zero=3, shard_context=True,
        sequence_parallel=True, recompute=recompute,
    )  # fmt: skip
    return estimate(ModelShape.preset("llama-3-8b"), layout, "h100", tokens)


@value
def adam_jump(times: float, beta2: float, beta1: float = 0.9) -> float:
    """Adam's step in learning rates, at a gradient `times` as large as all before.

    Those before were equal in size and of random sign: no momentum, v of one square.
    """
    return (1 - beta1) * times / sqrt(beta2 + (1 - beta2) * times**2)
