"""The page on rules of thumb: layouts that keep a rule, held against the search."""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from xtrain.plan import (
    Assumptions,
    Estimate,
    Layout,
    ModelShape,
    SearchSpace,
    estimate,
    memory_per_device,
    search,
    sent_by_axis,
    traffic_per_step,
)

from ...amounts import GiB, percent
from ...values import value
from .common import SEQUENCE, layout_name, step_bytes
from .index import BATCH, MODEL, RESERVE, USABLE, fit_70b_layout

SHAPES = {  # published sizes that have no preset
    "llama-2-13b": ModelShape(
        vocab_size=32000, hidden_size=5120, intermediate_size=13824,
        num_hidden_layers=40, num_attention_heads=40,
    )
}  # fmt: skip
RULES: dict[str, Callable[[Layout], bool]] = {
    "any": lambda layout: True,
    "data alone": lambda layout: layout.gpus == layout.data,
    "example": lambda one: (one.tensor, one.pipeline, one.context) == (8, 2, 1),
    "across nodes": lambda layout: layout.tensor > 8,
    "pipeline": lambda layout: layout.pipeline > 1,
    "stage 2": lambda layout: layout.zero == 2,
    "recomputed": lambda layout: layout.recompute != "none",
    "kept": lambda layout: layout.recompute == "none",
}


def shape_of(model: str) -> ModelShape:
    """A preset, or one of SHAPES."""
    return SHAPES.get(model) or ModelShape.preset(model)


@value
@lru_cache
def rule_layouts(model: str, gpus: int, device: str = "h100") -> tuple[Estimate, ...]:
    """What fits of all layouts with micro-batches of one sequence, fastest first."""
    found = search(
        shape_of(model), device, gpus, SEQUENCE, BATCH,
        space=SearchSpace(micro_batch=(1,)),
        assumptions=Assumptions(capacity=USABLE, reserve=RESERVE),
    ).found  # fmt: skip
    return tuple(one for one in found if one.verdict == "fits")


@value
def rule_fastest(
    model: str, gpus: int, rule: str, device: str = "h100"
) -> Estimate | None:
    """The fastest of the layouts that keep a rule."""
    found = rule_layouts(model, gpus, device)
    return next((one for one in found if RULES[rule](one.layout)), None)


@value
def rule_place(model: str, gpus: int, rule: str, device: str = "h100") -> int:
    """Its place among all, from 1."""
    one = rule_fastest(model, gpus, rule, device)
    if one is None:
        raise ValueError(f"{model} on {gpus} devices: no layout is {rule!r}")
    return rule_layouts(model, gpus, device).index(one) + 1


@value
def rule_longer(model: str, gpus: int, rule: str, device: str = "h100") -> float:
    """How much longer than the fastest a layout takes that keeps a rule."""
    one = rule_fastest(model, gpus, rule, device)
    if one is None:
        raise ValueError(f"{model} on {gpus} devices: no layout is {rule!r}")
    return one.seconds / rule_layouts(model, gpus, device)[0].seconds - 1


@value
def rule_named(model: str, gpus: int, rule: str, device: str = "h100") -> str:
    """The fastest layout that keeps a rule, by name, or why there is none."""
    one = rule_fastest(model, gpus, rule, device)
    if one is None:
        return "more devices than sequences" if gpus > BATCH else "does not fit"
    again = one.layout.recomputed
    return layout_name(one.layout) + ("" if again == "none" else f", {again}")


@value
def rule_and_longer(model: str, gpus: int, rule: str) -> str:
    """The same, and how much longer its step takes."""
    named = rule_named(model, gpus, rule)
    if rule_fastest(model, gpus, rule) is None:
        return named
    return f"{named}: {percent(rule_longer(model, gpus, rule))}"


SIZES = (
    ("llama-2-7b", 8), ("llama-3-8b", 64), ("llama-2-13b", 8), ("llama-2-13b", 64),
    ("llama-3-70b", 32), ("llama-3-70b", 128), ("llama-3-70b", 512),
    ("llama-3.1-405b", 512), ("llama-3.1-405b", 1024),
)  # fmt: skip


@value
def rule_recomputing() -> int:
    """Of the sizes of the table, those whose fastest layout recomputes something."""
    return sum(rule_layouts(*size)[0].layout.recompute != "none" for size in SIZES)


def cheap_pair(model: str, gpus: int) -> tuple[Estimate, Estimate]:
    """The fastest layout that keeps everything, and the same with selective."""
    kept = rule_fastest(model, gpus, "kept")
    if kept is None:
        raise ValueError(f"{model} on {gpus} devices: no layout keeps everything")
    again = replace(kept.layout, recompute="selective")
    pair = [
        estimate(shape_of(model), one, "h100", SEQUENCE, capacity=USABLE,
                 reserve=RESERVE)
        for one in (kept.layout, again)
    ]  # fmt: skip
    return pair[0], pair[1]


@value
def rule_cheap(model: str, gpus: int) -> float:
    """How much longer a step takes with selective recomputation."""
    kept, again = cheap_pair(model, gpus)
    return again.seconds / kept.seconds - 1


@value
def rule_cheap_frees(model: str, gpus: int) -> float:
    """What that frees of the activations."""
    kept, again = cheap_pair(model, gpus)
    return 1 - again.memory.activations / kept.memory.activations


@value
@lru_cache
def rule_estimate(layout: Layout, device: str = "h100", nodes: int = 8) -> Estimate:
    """The 70B model in one layout, stages 2 and 3 in a pipeline allowed."""
    return estimate(
        ModelShape.preset(MODEL), layout, device, SEQUENCE, gpus_per_node=nodes,
        capacity=USABLE, reserve=RESERVE, sharded_pipeline=True,
    )  # fmt: skip


@value
def rule_tensor_share(ranks: int, device: str = "h100", nodes: int = 8) -> float:
    """The share of a step of the 70B model in collectives of tensor ranks."""
    layout = Layout(tensor=ranks, pipeline=8, micro_batches=64, sequence_parallel=True)
    found = rule_estimate(layout, device, nodes)
    return found.parts["tensor"] / found.seconds


@value
def rule_example(what: str, stage: int = 1) -> float:
    """Of TP8 PP2 DP4 with a stage: GiB, bytes sent, seconds, or a part's share."""
    found = rule_estimate(fit_70b_layout(zero=stage))
    if what == "GiB":
        return found.memory.total / GiB
    if what == "sent":
        return sent_by_data_ranks(found.layout)
    if what == "seconds":
        return found.seconds
    return found.parts[what] / found.seconds


@value
def sent_by_data_ranks(layout: Layout) -> float:
    """Bytes of gradients and weights that a device of the 70B model sends in a step."""
    sent = traffic_per_step(ModelShape.preset(MODEL), layout, SEQUENCE)
    return sent_by_axis(sent)["data"]


@value
def rule_volume(stage: int, batches: int, dtypes: str) -> float:
    """Bytes that a stage of ZeRO sends in a step, over those of plain DDP."""
    plain = Layout(data=64, micro_batches=batches)
    sharded = step_bytes("llama-3-8b", dtypes, replace(plain, zero=stage))
    return sharded / step_bytes("llama-3-8b", dtypes, plain)


@value
def rule_sequence_parallel(what: str) -> float:
    """Bytes with slices of the sequence over those without, of what is kept or sent."""
    kept, sent = [], []
    for sliced in (True, False):
        layout = Layout(tensor=8, sequence_parallel=sliced)
        held = memory_per_device(ModelShape.preset(MODEL), layout, SEQUENCE)
        kept.append(held.activations)
        sent.append(step_bytes(MODEL, "megatron-bf16", layout))
    less, whole = kept if what == "kept" else sent
    return less / whole
