"""The page of worked scenarios: runs that are estimated, and what they would lose."""

from dataclasses import replace
from functools import lru_cache
from math import sqrt
from typing import Any

from xtrain.plan import Estimate, Layout, ModelShape, estimate

from ...values import value

MODEL, SEQUENCE = "llama-3-70b", 8192
LOW_MFU_RUN = Layout(
    tensor=8, pipeline=2, data=4, zero=1, sequence_parallel=True, micro_batches=128
)
LOW_MFU: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "": ({}, {}),
    "recompute": ({"recompute": "full"}, {}),
    "unfused": ({}, {"attention": "unfused"}),
    "nodes": ({"tensor": 16, "data": 2, "micro_batches": 256}, {}),
    "few": ({"micro_batches": 4}, {}),
    "network": ({}, {"network": 25e9}),
}
"""What differs from that run, in its layout and beside it."""


@value
@lru_cache
def low_mfu(what: str = "") -> Estimate:
    """The 70B run on 64 H100, as it was or with one thing that went wrong."""
    changed, assumed = LOW_MFU[what]
    layout = replace(LOW_MFU_RUN, **changed)
    return estimate(ModelShape.preset(MODEL), layout, "h100", SEQUENCE, **assumed)


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
