"""What the memory calculator and the layout planner answer.

Standard library only: the browser's Python runs this file.
"""

import json

from xtrain.plan.activations import RECOMPUTE
from xtrain.plan.config_json import shape_of_config
from xtrain.plan.device_memory import DeviceMemory, verdict
from xtrain.plan.estimate import Assumptions
from xtrain.plan.hardware import ACCELERATORS, Accelerator
from xtrain.plan.layout import Layout
from xtrain.plan.layout_rules import broken_rules
from xtrain.plan.memory import RECIPES
from xtrain.plan.published import PUBLISHED
from xtrain.plan.search import SearchSpace, search
from xtrain.plan.shapes import PRESETS, ModelShape

from .forms import Choice, Field, Number, Upload
from .markup import html_table
from .repairs import memory_by_position, nearest_sizes, smaller_layouts

GIB = 2**30
RESERVE = 4 * GIB
"""For the runtime, communication buffers and what is not counted."""
MODELS = tuple(sorted({*PRESETS, *PUBLISHED}))
SHOWN = 8
"""Layouts of the planner's table."""

MEMORY_FIELDS: tuple[Field, ...] = (
    Choice("model", "Model", "llama-3-70b", MODELS),
    Upload("config", "or a config.json of yours", ".json"),
    Choice("gpu", "GPU", "h100", tuple(sorted(ACCELERATORS))),
    Number("sequence", "Tokens of a sequence", 4096, 1, 2**21),
    Number("micro_batch", "Sequences of a micro-batch", 1, 1, 1024),
    Number("micro_batches", "Micro-batches of a step", 16, 1, 4096),
    Number("tensor", "Tensor ranks", 8, 1, 1024),
    Number("pipeline", "Pipeline ranks", 2, 1, 1024),
    Number("context", "Context ranks", 1, 1, 1024),
    Number("data", "Data ranks", 4, 1, 8192),
    Number("expert", "Expert ranks (of the data ranks)", 1, 1, 1024),
    Choice("zero", "ZeRO stage", "1", ("0", "1", "2", "3")),
    Choice("recompute", "Recompute", "none", RECOMPUTE),
    Choice("recipe", "Bytes of a parameter", "megatron18", tuple(RECIPES)),
)

LAYOUT_FIELDS: tuple[Field, ...] = (
    Choice("model", "Model", "llama-3-70b", MODELS),
    Upload("config", "or a config.json of yours", ".json"),
    Choice("gpu", "GPU", "h100", tuple(sorted(ACCELERATORS))),
    Number("gpus", "How many GPUs", 64, 1, 1024),
    Number("sequence", "Tokens of a sequence", 4096, 1, 2**20),
    Number("batch", "Sequences of a step", 512, 1, 65536),
    Choice("recipe", "Bytes of a parameter", "megatron18", tuple(RECIPES)),
)


BEST_FIELDS: tuple[Field, ...] = (
    Choice("model", "Model", "llama-3-70b", MODELS),
    Choice("gpu", "GPU", "h100", tuple(sorted(ACCELERATORS))),
    Number("gpus", "How many GPUs", 64, 1, 1024),
)
SEQUENCE, BATCH = 4096, 512
"""Of the short calculator: tokens of a sequence, sequences of a step."""
FEW = SearchSpace(
    zero=(1, 3), micro_batch=(1, 2), schedules=(("one_f_one_b", 1),),
    tensor=(1, 2, 4, 8), context=(1,),
)  # fmt: skip
"""What it tries, so that it answers at once."""
LABELS = {
    "num_attention_heads": "query heads", "num_key_value_heads": "key heads",
    "num_hidden_layers": "layers", "hidden_size": "hidden size",
    "intermediate_size": "inner size", "vocab_size": "vocabulary",
    "num_local_experts": "experts",
}  # fmt: skip
"""What a reader calls the sizes of a model; fields have labels of their own."""


def shape_from(model: str, config: str) -> ModelShape:
    """The model of a `config.json`, if there is one, or a preset."""
    if not config:
        return ModelShape.preset(model)
    try:
        values = json.loads(config)
    except (ValueError, RecursionError) as problem:
        raise ValueError(f"The file is not JSON: {problem}") from None
    if not isinstance(values, dict):
        raise ValueError("The file has no entries")
    return shape_of_config(values)


def memory(
    model: str,
    config: str,
    gpu: str,
    sequence: int,
    zero: str,
    recompute: str,
    recipe: str,
    **sizes: int,
) -> str:
    """What the fullest device holds in each phase of a step, by what it is for."""
    shape, device = shape_from(model, config), Accelerator.preset(gpu)
    layout = Layout(
        zero=int(zero),
        recompute=recompute,
        sequence_parallel=sizes["tensor"] > 1,
        **sizes,
    )
    broken = broken_rules(shape, layout, sequence)
    if broken:
        would_do = [
            f"{name}={value}" for name, value in nearest_sizes(shape, layout, sequence)
        ]
        instead = f". It would do with {', or with '.join(would_do)}" * bool(would_do)
        raise ValueError("; ".join(why for _, why in broken) + instead)
    by_rank = memory_by_position(shape, layout, sequence, recipe)
    fullest = max(by_rank, key=lambda at: most(by_rank[at]).total)
    phases = by_rank[fullest]
    peak = most(phases)
    says = verdict(peak.total, device.memory, RESERVE)
    words = (
        f"{layout.gpus} GPUs, {layout.batch} sequences a step: {says}. The {fullest} "
        f"pipeline rank needs {peak.total / GIB:.2f} GiB of "
        f"{device.memory / GIB:.2f}, and {RESERVE / GIB:g} should stay free."
    )
    held = [
        name for name in peak.parts() if any(p.parts()[name] for p in phases.values())
    ]
    rows = [
        (name.replace("_", " "), *(gibibytes(p.parts()[name]) for p in phases.values()))
        for name in held
    ]
    rows.append(("together", *(gibibytes(p.total) for p in phases.values())))
    shown = html_table(words, ("GiB", *phases), rows)
    limit = device.memory - RESERVE
    if peak.total > limit:
        shown = changes(shape, layout, device, sequence, recipe, limit) + shown
    return bars(phases, held, device.memory) + shown


def changes(
    shape: ModelShape,
    layout: Layout,
    device: Accelerator,
    sequence: int,
    recipe: str,
    limit: float,
) -> str:
    """What would make it fit, the fastest first."""
    found = smaller_layouts(shape, layout, device, sequence, recipe, limit)
    if not found:
        return "<p>No single change makes it fit: try several.</p>"
    rows = [
        (words, f"{needed / GIB:.2f}", f"{seconds:.2f}")
        for words, needed, seconds in found
    ]
    words = "Single changes that make it fit, fastest first"
    return html_table(words, ("Change", "GiB", "s/step"), rows)


def most(phases: dict[str, DeviceMemory]) -> DeviceMemory:
    """The fullest moment of a step."""
    return max(phases.values(), key=lambda memory: memory.total)


def gibibytes(number: float) -> str:
    """Two digits are enough, and nothing is a dash."""
    return f"{number / GIB:.2f}" if number else "–"


ROW, WIDTH = 40, 360
"""Of a bar with its name above it, legible at the width of a phone."""


def bars(phases: dict[str, DeviceMemory], held: list[str], capacity: float) -> str:
    """A bar for each phase, cut by what the bytes are for; a line at the capacity."""
    largest = max(capacity, most(phases).total)
    scale = (WIDTH - 4) / largest
    height = len(phases) * ROW + 8
    parts = [
        f'<svg role="img" class="xt-bars" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}"><title>Memory over a step</title>'
    ]
    for row, (phase, held_now) in enumerate(phases.items()):
        top, x = 18 + row * ROW, 0.0
        parts.append(f'<text x="0" y="{top - 5}">{phase}</text>')
        for number, name in enumerate(held):
            value = held_now.parts()[name]
            if value:
                width = value * scale
                parts.append(
                    f'<rect class="xt-p{number % 8}" x="{x:.1f}" y="{top}" '
                    f'width="{width:.1f}" height="{ROW - 24}"><title>{phase}: '
                    f"{name.replace('_', ' ')} {gibibytes(value)} GiB</title></rect>"
                )
                x += width
    line = capacity * scale
    parts.append(f'<path class="xt-limit" d="M{line:.1f} 0V{height}"/></svg>')
    names = "".join(
        f'<li class="xt-p{number % 8}">{name.replace("_", " ")}</li>'
        for number, name in enumerate(held)
    )
    return (
        f'<div class="xt-scroll" tabindex="0">{"".join(parts)}</div>'
        f'<ul class="xt-key">{names}<li class="xt-limit">memory of the GPU</li></ul>'
    )


def best(model: str, gpu: str, gpus: int) -> str:
    """The fastest layout that fits, in one row."""
    shape, device = ModelShape.preset(model), Accelerator.preset(gpu)
    assumed = Assumptions(reserve=RESERVE)
    found = search(
        shape, device, gpus, SEQUENCE, BATCH, space=FEW, assumptions=assumed
    ).found[:1]
    if not found:
        return f"<p>No layout of {gpus} GPUs has room for it.</p>"
    rows = [
        (str(one.layout), f"{one.memory.total / GIB:.1f}", f"{one.seconds:.2f}",
         share(one.mfu), f"{one.range[0] / gpus:,.0f} to {one.range[1] / gpus:,.0f}")
        for one in found
    ]  # fmt: skip
    words = f"{BATCH} sequences of {SEQUENCE} tokens a step: the fastest layout"
    header = ("Layout", "GiB", "s/step", "MFU", "tokens/s a GPU")
    return html_table(words, header, rows)


def layouts(
    model: str,
    config: str,
    gpu: str,
    gpus: int,
    sequence: int,
    batch: int,
    recipe: str,
) -> str:
    """The fastest layouts that fit, and why others do not."""
    shape, device = shape_from(model, config), Accelerator.preset(gpu)
    assumed = Assumptions(recipe=recipe, reserve=RESERVE)
    result = search(shape, device, gpus, sequence, batch, assumptions=assumed)
    rows = [
        (
            str(one.layout),
            f"{one.seconds:.2f}",
            share(one.mfu),
            f"{one.memory.total / GIB:.1f}",
            one.verdict,
            schedule_of(one.layout),
            one.layout.recomputed,
            f"{one.layout.micro_batch} x {one.layout.micro_batches}",
            share(one.causal_mfu),
            f"{one.range[0] / gpus:,.0f} to {one.range[1] / gpus:,.0f}",
        )
        for one in result.found[:SHOWN]
    ]
    header = ("Layout", "s/step", "MFU", "GiB", "Memory", "Schedule", "Recompute",
              "Batch x count", "causal", "tokens/s a GPU")  # fmt: skip
    words = (
        f"{result.tried} layouts tried, {result.estimated} are legal, "
        f"{len(result.found)} fit: the fastest of them"
    )
    first = html_table(words, header, rows) if rows else ""
    failed = [
        (one.rule, str(one.count), f"{one.example}: {one.why}")
        for one in result.rejected
    ]
    none = "" if rows else "<p>No layout fits.</p>"
    return f"{none}{first}" + html_table(
        "Why others fail", ("Rule", "Layouts", "For example"), failed
    )


def share(value: float) -> str:
    """In per cent; a dash above 100, where all pairs are counted and half computed."""
    return f"{value:.1%}" if value <= 1 else "–"


def schedule_of(layout: Layout) -> str:
    """The pipeline's schedule; a dash without a pipeline."""
    if layout.pipeline == 1:
        return "–"
    chunks = f", {layout.chunks} chunks" if layout.chunks > 1 else ""
    return layout.schedule + chunks
