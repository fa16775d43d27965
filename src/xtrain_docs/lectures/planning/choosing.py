"""The 70B model on 64 devices: what fits, what is sent, and what a search finds."""

from functools import lru_cache

from xtrain.plan import (
    Assumptions,
    DeviceMemory,
    Layout,
    ModelShape,
    SearchResult,
    device_parameters,
    memory_per_device,
    search,
    traffic_per_step,
    verdict,
)
from xtrain.plan.step_traffic import sent_by_axis

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, bar_chart, fit
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, value

MODEL, DEVICE, GPUS = "llama-3-70b", "a100-80gb", 64
SEQUENCE, BATCH = 8192, 512
"""Tokens of a sequence, sequences of a step."""
GIB = 2**30
USABLE, RESERVE = 79.2 * GIB, 4 * GIB
"""What a driver reports of 80 GB, and what CUDA, NCCL and workspaces take of it."""
RECIPES = ("zero16", "megatron18", "fp32_accum20")
CASES = (
    *((recipe, stage) for stage in (0, 1) for recipe in RECIPES),
    ("zero16", 2),
    ("zero16", 3),
)
WORDS = {"fits": "fits", "tight": "tight", "does not fit": "**does not fit**"}
WIDTH = 420
HYPHEN = "\N{NON-BREAKING HYPHEN}"


def example(
    zero: int = 0, recompute: str = "none", batches: int = BATCH // 4
) -> Layout:
    """TP8 PP2 DP4, with slices of the sequence."""
    return Layout(tensor=8, pipeline=2, data=4, zero=zero, sequence_parallel=True,
                  micro_batches=batches, recompute=recompute)  # fmt: skip


def counted(memory: DeviceMemory) -> float:
    """States and activations: what the table compares."""
    return memory.states + memory.activations + memory.live_layer


def first_rank(recipe: str, zero: int, sequence: int, recompute: str) -> DeviceMemory:
    """The first pipeline rank's memory; it has most micro-batches in flight."""
    shape, layout = ModelShape.preset(MODEL), example(zero, recompute)
    return memory_per_device(shape, layout, sequence, recipe=recipe)


def stage_name(zero: int) -> str:
    """The stage with a hyphen at which no line breaks."""
    return f"ZeRO-{zero}".replace("-", HYPHEN)


@value
def layout_name(layout: Layout) -> str:
    """As it prints, with the same hyphen."""
    return str(layout).replace("-", HYPHEN)


@TABLES
def fit_70b_states(sequences: tuple[int, ...] = (SEQUENCE // 2, SEQUENCE)) -> Table:
    """Bytes of the first rank by recipe and stage, with and without recomputation."""
    rows = []
    for recipe, zero in CASES:
        states = first_rank(recipe, zero, sequences[0], "none").states
        row = [f"`{recipe}`", stage_name(zero), number(states / GIB)]
        for sequence in sequences:
            for recompute in ("none", "full"):
                found = counted(first_rank(recipe, zero, sequence, recompute))
                said = WORDS[verdict(found, USABLE, RESERVE)]
                row.append(f"{number(found / GIB)} {said}")
        rows.append(row)
    header = ["recipe", "stage", "states"]
    header += [
        f"{sequence} tokens, recompute {way}"
        for sequence in sequences
        for way in ("none", "full")
    ]
    return Table(header, rows, "llr" + "r" * (2 * len(sequences)))


@FIGURES
def fit_70b_memory(sequence: int = SEQUENCE, recipe: str = "megatron18") -> str:
    """GiB of the first rank by ZeRO stage: states, and activations on top."""
    bars = {}
    for zero in (0, 1):
        for recompute in ("none", "full"):
            memory = first_rank(recipe, zero, sequence, recompute)
            name = f"ZeRO-{zero}, {recompute}"
            bars[name] = {
                "states": memory.states / GIB,
                "with activations": counted(memory) / GIB,
            }
    drawing = bar_chart(
        bars,
        Axis("GiB on a device", "linear", lambda gib: f"{gib:.0f}", low=0.0),
        f"{MODEL} as TP8 PP2 DP4, {sequence} tokens, by stage and recomputation",
        f"Computed with the recipe {recipe}.",
        reference=(USABLE / GIB, "usable"),
        width=WIDTH,
    )
    return fit(drawing, WIDTH)


@value
@lru_cache
def fit_70b_found(sequence: int = SEQUENCE, batch: int = BATCH) -> SearchResult:
    """All layouts of 64 devices."""
    shape = ModelShape.preset(MODEL)
    assumed = Assumptions(capacity=USABLE, reserve=RESERVE)
    return search(shape, DEVICE, GPUS, sequence, batch, assumptions=assumed)


@value
def fit_70b_tried(sequence: int = SEQUENCE) -> int:
    """Layouts that the search has tried."""
    return fit_70b_found(sequence).tried


@value
def fit_70b_spread(sequence: int = SEQUENCE, top: int = 8) -> float:
    """How much longer the last of the ranked ones takes than the first."""
    found = fit_70b_found(sequence).found
    return found[top - 1].seconds / found[0].seconds - 1


@value
def fit_70b_gib(recipe: str, zero: int, sequence: int, recompute: str) -> float:
    """GiB of states and activations on the first rank."""
    return counted(first_rank(recipe, zero, sequence, recompute)) / GIB


@value
def fit_70b_sent() -> dict[str, int]:
    """What a device of the example sends in a step, by axis."""
    return sent_by_axis(
        traffic_per_step(ModelShape.preset(MODEL), example(zero=1), SEQUENCE)
    )


@value
def fit_70b_parameters() -> int:
    """Of a device of the first pipeline rank."""
    return device_parameters(ModelShape.preset(MODEL), example()).total


@value
def fit_70b(name: str) -> float:
    """What the tables take for granted: bytes of memory, and sizes of a step."""
    return {
        "usable": USABLE,
        "reserve": RESERVE,
        "sequence": SEQUENCE,
        "batch": BATCH,
        "micro_batches": example().micro_batches,
    }[name]
