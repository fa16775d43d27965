"""Rules of thumb about whole layouts, held against the search of `xtrain.plan`."""

from collections.abc import Callable
from functools import lru_cache

from xtrain.plan import (
    RECIPES,
    Assumptions,
    Estimate,
    Layout,
    ModelShape,
    SearchSpace,
    hardware_flops,
    search,
    zero_memory,
)

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import percent, value
from .choosing import BATCH, RESERVE, SEQUENCE, USABLE, layout_name

GIB = 2**30
DEVICE, EXAMPLE = "h100", "llama-3-70b"
SHAPES = {
    "llama-2-13b": ModelShape(
        vocab_size=32000,
        hidden_size=5120,
        intermediate_size=13824,
        num_hidden_layers=40,
        num_attention_heads=40,
    )
}
"""Published sizes that have no preset."""
SIZES = (
    ("llama-2-7b", 1), ("llama-2-7b", 8), ("llama-3-8b", 64), ("llama-2-13b", 8),
    ("llama-2-13b", 64), (EXAMPLE, 32), (EXAMPLE, 128), (EXAMPLE, 512),
    ("llama-3.1-405b", 512), ("llama-3.1-405b", 1024),
)  # fmt: skip
COUNTS = (32, 64, 128, 256, 512, 1024)
EXAMPLES = (("a100-80gb", 64), ("a100-80gb", 256),
            *(("h100", gpus) for gpus in COUNTS[:-1]))  # fmt: skip
NONE = "–"


def shape_of(model: str) -> ModelShape:
    """A preset, or one of SHAPES."""
    return SHAPES.get(model) or ModelShape.preset(model)


@lru_cache
def layouts(model: str, gpus: int, device: str = DEVICE) -> tuple[Estimate, ...]:
    """What fits of all layouts with micro-batches of one sequence, fastest first."""
    found = search(
        shape_of(model),
        device,
        gpus,
        SEQUENCE,
        BATCH,
        space=SearchSpace(micro_batch=(1,)),
        assumptions=Assumptions(capacity=USABLE, reserve=RESERVE),
    ).found
    return tuple(one for one in found if one.verdict == "fits")


def fastest_with(
    model: str, gpus: int, keeps: Callable[[Layout], bool], device: str = DEVICE
) -> Estimate | None:
    """The fastest of the layouts that keep a rule."""
    found = layouts(model, gpus, device)
    return next((one for one in found if keeps(one.layout)), None)


def only_data(layout: Layout) -> bool:
    """Data parallelism and ZeRO alone."""
    return layout.gpus == layout.data


def as_in_the_note(layout: Layout) -> bool:
    """TP8 PP2, and data ranks."""
    sizes = layout.tensor, layout.pipeline, layout.context
    return sizes == (8, 2, 1)


def longer(one: Estimate, best: Estimate) -> float:
    """How much longer its step takes."""
    return one.seconds / best.seconds - 1


def _named(one: Estimate) -> str:
    recompute = ", recompute" if one.layout.recompute == "full" else ""
    return layout_name(one.layout) + recompute


@TABLES
def rule_of_sizes() -> Table:
    """Models and device counts: the fastest layout, and data parallelism alone."""
    rows = []
    for model, gpus in SIZES:
        found, alone = layouts(model, gpus), fastest_with(model, gpus, only_data)
        row = [f"`{model}`", str(gpus)]
        if not found:
            rows.append([*row, "nothing fits", NONE, NONE, NONE])
            continue
        said = ["does not fit", NONE]
        if gpus > BATCH:
            said = ["more devices than sequences", NONE]
        if alone:
            said = [_named(alone), percent(longer(alone, found[0]))]
        rows.append([*row, _named(found[0]), percent(found[0].mfu), *said])
    header = ["model", "devices", "fastest", "MFU", "data parallelism alone", "longer"]
    return Table(header, rows, "lrlrlr")


@FIGURES
def rule_of_three_dimensions() -> str:
    """MFU of a 70B model over devices: the fastest layout, and those of two rules."""
    kept: dict[str, Callable[[Layout], bool]] = {
        "fastest": lambda layout: True,
        "data parallelism alone": only_data,
        "TP8 PP2": as_in_the_note,
    }
    series = {}
    for name, keeps in kept.items():
        each = [(gpus, fastest_with(EXAMPLE, gpus, keeps)) for gpus in COUNTS]
        series[name] = [(float(gpus), 100 * one.mfu) for gpus, one in each if one]
    return line_chart(
        series,
        Axis("devices", "log2", lambda count: f"{count:.0f}"),
        Axis("MFU", "linear", lambda share: f"{share:.0f} %", low=0.0),
        f"{EXAMPLE} on {COUNTS[0]} to {COUNTS[-1]} devices, by rule",
        "Estimated for a batch that stays the same.",
    )


@TABLES
def rule_of_the_example() -> Table:
    """TP8 PP2 of a 70B model on other devices and counts."""
    rows = []
    for device, gpus in EXAMPLES:
        found = layouts(EXAMPLE, gpus, device)
        for one in found:
            if as_in_the_note(one.layout):
                rows.append(
                    [f"`{device}`", str(gpus), _named(one), percent(one.mfu),
                     str(found.index(one) + 1), _named(found[0]),
                     percent(longer(one, found[0]))]
                )  # fmt: skip
                break
    header = ["device", "devices", "by the rule", "MFU", "place", "fastest", "longer"]
    return Table(header, rows, "lrlrrlr")


@TABLES
def rule_of_recomputation() -> Table:
    """The fastest layout that keeps all activations, and the fastest that does not."""
    rows = []
    for model, gpus in SIZES:
        kept, again = (
            fastest_with(model, gpus, lambda layout, way=way: layout.recompute == way)  # type: ignore[misc]
            for way in ("none", "full")
        )
        if again is None:
            continue
        row = [f"`{model}`", str(gpus)]
        if kept is None:
            rows.append([*row, "does not fit", _named(again), NONE])
        else:
            more = percent(longer(again, kept))
            rows.append([*row, _named(kept), _named(again), more])
    header = ["model", "devices", "all kept", "recomputed", "longer"]
    return Table(header, rows, "lrllr")


@value
def rule_recompute_flops(model: str) -> float:
    """FLOPs with full recomputation over those without, less one."""
    shape = shape_of(model)
    counted = (
        hardware_flops(shape, SEQUENCE, 1, way, causal=True) for way in ("full", "none")
    )
    again, once = counted
    return again / once - 1


@value
def rule_ddp_limit(stage: int, ranks: int, recipe: str = "zero16") -> float:
    """Billions of parameters whose states fill what a device of 80 GB has."""
    billion = 10**9
    return USABLE / zero_memory(billion, ranks, stage, RECIPES[recipe])


@value
def rule_longer(model: str, gpus: int, rule: str) -> float:
    """How much longer than the fastest a layout takes that keeps a rule."""
    rules = {"data alone": only_data, "example": as_in_the_note,
             "across nodes": lambda layout: layout.tensor > 8,
             "no pipeline": lambda layout: layout.pipeline == 1}  # fmt: skip
    one = fastest_with(model, gpus, rules[rule])
    if one is None:
        raise ValueError(f"{model} on {gpus} devices: no layout is {rule!r}")
    return longer(one, layouts(model, gpus)[0])
