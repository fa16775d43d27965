"""A whole model with experts: what a rank holds, and who sums what."""

from functools import lru_cache
from math import prod

from torch import nn

from xtrain.model import XtrainConfig, XtrainModel
from xtrain.model.parameters import is_of_experts, is_summed_over, placement_of

from ...figures import REGISTRY
from ...svg import Axis, bar_chart
from ...values import value

CONFIG = XtrainConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4,
    num_local_experts=8, num_experts_per_tok=2,
)  # fmt: skip
LAYOUTS = {
    "one rank": (1, 1),
    "expert 2": (2, 1),
    "expert 4": (4, 1),
    "2 × expert 2": (2, 1),
    "expert 2, tensor 2": (2, 2),
}
"""Sizes of expert and tensor."""


@lru_cache
def shapes(expert: int = 1, tensor: int = 1) -> dict[str, list[int]]:
    """Of each parameter's part that the first rank of a layout holds."""
    whole: dict[str, nn.Parameter] = dict(XtrainModel(CONFIG).named_parameters())
    return {
        name: list(placement_of(name, CONFIG, 0, tensor, 0, expert).of(one).shape)
        for name, one in whole.items()
    }


@value
def shape_of(name: str, expert: int = 1, tensor: int = 1) -> str:
    """Of a parameter of layer 0, as text."""
    return " × ".join(map(str, shapes(expert, tensor)[f"layers.0.{name}"]))


@value
def summed_over(name: str) -> str:
    """The axes over which the gradient of a parameter of layer 0 is summed."""
    axes = ("expert_data", "expert", "tensor")
    return ", ".join(f"`{a}`" for a in axes if is_summed_over(f"layers.0.{name}", a))


@REGISTRY
def expert_model_shares() -> str:
    """Elements that a rank holds of experts and of everything else, by layout."""
    bars = {}
    for layout, sizes in LAYOUTS.items():
        held = {name: prod(shape) for name, shape in shapes(*sizes).items()}
        experts = sum(count for name, count in held.items() if is_of_experts(name))
        others = sum(held.values()) - experts
        bars[layout] = {"experts": float(experts), "all else": float(others)}
    axis = Axis("parameters of a rank", format=lambda n: f"{n / 1000:g} k")
    title = "What a rank holds of a small model with eight experts a layer"
    return bar_chart(bars, axis, title, width=400)
