"""The page on choosing a layout: the 70B model on 64 devices."""

from functools import lru_cache

from xtrain.plan import (
    Accelerator,
    Assumptions,
    Change,
    Layout,
    ModelShape,
    SearchResult,
    limits,
    memory_per_device,
    search,
    verdict,
    what_if,
)

from ...amounts import GiB, number
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, bar_chart
from ...values import VALUES, value
from .common import SEQUENCE

MODEL, BATCH = "llama-3-70b", 512
USABLE, RESERVE = 79.2 * GiB, 4 * GiB
"""What a driver reports of 80 GB, and what CUDA, NCCL and workspaces take of it."""
VERDICTS = {"fits": "fits", "tight": "tight", "does not fit": "**does not fit**"}
VALUES["verdict_words"] = VERDICTS
WIDTH = 420


@value
def fit_70b(name: str) -> float:
    """What the tables take for granted: bytes of memory, and sizes of a step."""
    return {
        "usable": USABLE, "reserve": RESERVE, "sequence": SEQUENCE, "batch": BATCH,
        "micro_batches": fit_70b_layout().micro_batches,
    }[name]  # fmt: skip


@value
def fit_70b_layout(zero: int = 0, recompute: str = "none") -> Layout:
    """TP8 PP2 DP4, with slices of the sequence."""
    return Layout(tensor=8, pipeline=2, data=4, zero=zero, sequence_parallel=True,
                  micro_batches=BATCH // 4, recompute=recompute)  # fmt: skip


@value
def fit_70b_gib(
    recipe: str, zero: int, sequence: int = SEQUENCE, recompute: str = "none",
    activations: bool = True,
) -> float:  # fmt: skip
    """GiB of the first rank, which has most micro-batches in flight."""
    layout = fit_70b_layout(zero, recompute)
    held = memory_per_device(ModelShape.preset(MODEL), layout, sequence, recipe=recipe)
    kept = held.activations + held.live_layer if activations else 0
    return (held.states + kept) / GiB


@value
def fit_70b_says(recipe: str, zero: int, sequence: int, recompute: str) -> str:
    """The same, and whether it fits."""
    found = fit_70b_gib(recipe, zero, sequence, recompute)
    return f"{number(found)} {VERDICTS[verdict(found * GiB, USABLE, RESERVE)]}"


@FIGURES
def fit_70b_memory(recipe: str = "megatron18") -> str:
    """GiB of the first rank by ZeRO stage: states, and activations on top."""
    bars = {
        f"ZeRO-{zero}, {way}": {
            "states": fit_70b_gib(recipe, zero, activations=False),
            "with activations": fit_70b_gib(recipe, zero, SEQUENCE, way),
        }
        for zero in (0, 1)
        for way in ("none", "full")
    }
    return bar_chart(
        bars,
        Axis("GiB on a device", "linear", lambda gib: f"{gib:.0f}", low=0.0),
        f"{MODEL} as TP8 PP2 DP4, {SEQUENCE} tokens, by stage and recomputation",
        f"Computed with the recipe {recipe}.",
        reference=(USABLE / GiB, "usable"),
        width=WIDTH,
    )


@value
@lru_cache
def fit_70b_found() -> SearchResult:
    """All layouts of 64 devices."""
    assumed = Assumptions(capacity=USABLE, reserve=RESERVE)
    return search(ModelShape.preset(MODEL), "a100-80gb", 64, SEQUENCE, BATCH,
                  assumptions=assumed)  # fmt: skip


@value
def fit_70b_limits() -> list[str]:
    """What limits the fastest layout, a sentence each."""
    return limits(fit_70b_found().found[0], USABLE, Accelerator.preset("a100-80gb"))


@value
def fit_70b_what_if() -> list[Change]:
    """What would change it."""
    assumed = Assumptions(capacity=USABLE, reserve=RESERVE)
    layout = fit_70b_found().found[0].layout
    return what_if(ModelShape.preset(MODEL), layout, "a100-80gb", SEQUENCE, assumed)
