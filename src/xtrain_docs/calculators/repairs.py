"""What would do instead: of a layout that breaks a rule, or does not fit.

Standard library only: the browser's Python runs this file.
"""

from collections.abc import Iterator
from dataclasses import replace

from xtrain.plan.device_memory import (
    DeviceMemory,
    memory_over_step,
    pipeline_positions,
)
from xtrain.plan.estimate import estimate
from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import Layout
from xtrain.plan.layout_rules import broken_rules
from xtrain.plan.shapes import ModelShape

SIZES = "tensor", "pipeline", "context", "expert", "data", "micro_batches"
FARTHEST = 64
SHOWN = 3


def allowed(shape: ModelShape, layout: Layout, sequence: int) -> bool:
    return not broken_rules(shape, layout, sequence)


def nearest_sizes(
    shape: ModelShape, layout: Layout, sequence: int
) -> list[tuple[str, int]]:
    """Single sizes that would mend a layout which breaks a rule: (field, value)."""
    found = []
    for name in SIZES:
        given = getattr(layout, name)
        for value in sorted(range(1, FARTHEST + 1), key=lambda v: abs(v - given)):
            other = _replaced(layout, **{name: value})
            if other is not None and allowed(shape, other, sequence):
                found.append((name, value))
                break
    return sorted(found, key=lambda one: abs(one[1] - getattr(layout, one[0])))[:SHOWN]


def smaller_layouts(
    shape: ModelShape,
    layout: Layout,
    device: Accelerator,
    sequence: int,
    recipe: str,
    limit: float,
) -> list[tuple[str, float, float]]:
    """Single changes after which every rank needs at most `limit` bytes, fastest first.

    Returns:
        (what is changed, bytes of the fullest rank, seconds of a step) of each.
    """
    found = []
    for words, other in _changes(layout):
        if other is None or not allowed(shape, other, sequence):
            continue
        needed = peak(shape, other, sequence, recipe)
        if needed <= limit:
            seconds = estimate(shape, other, device, sequence, recipe=recipe).seconds
            found.append((words, needed, seconds))
    return sorted(found, key=lambda one: one[2])[:SHOWN]


def peak(shape: ModelShape, layout: Layout, sequence: int, recipe: str) -> float:
    """Bytes of the fullest rank in the fullest phase of a step."""
    held = memory_by_position(shape, layout, sequence, recipe)
    return max(phase.total for phases in held.values() for phase in phases.values())


def memory_by_position(
    shape: ModelShape, layout: Layout, sequence: int, recipe: str
) -> dict[str, dict[str, DeviceMemory]]:
    """What a rank holds in each phase of a step, by its position in the pipeline."""
    return {
        position: memory_over_step(shape, layout, sequence, rank=rank, recipe=recipe)
        for position, rank in pipeline_positions(layout).items()
    }


def _changes(layout: Layout) -> Iterator[tuple[str, Layout | None]]:
    """The batch of a step stays; only the last changes take more GPUs."""
    for stage in range(layout.zero + 1, 4):
        yield f"ZeRO stage {stage}", _replaced(layout, zero=stage)
    for way in ("selective", "full"):
        if layout.recompute != way:
            yield f"Recompute {way}", _replaced(layout, recompute=way)
    if layout.micro_batch > 1:
        count = layout.micro_batch * layout.micro_batches
        yield (
            "Micro-batches of one sequence",
            _replaced(layout, micro_batch=1, micro_batches=count),
        )
    for name in ("tensor", "pipeline", "context"):
        twice, half = 2 * getattr(layout, name), layout.data // 2
        again = 2 * layout.micro_batches
        words = f"{name.capitalize()} ranks {twice}, data ranks {half}"
        if layout.data % 2 == 0:
            yield (
                words,
                _replaced(layout, data=half, micro_batches=again, **{name: twice}),
            )
        words = f"{name.capitalize()} ranks {twice}, {2 * layout.gpus} GPUs"
        yield words, _replaced(layout, **{name: twice})


def _replaced(layout: Layout, **values: object) -> Layout | None:
    """Another layout; None if there is none like it."""
    try:
        made = replace(layout, **values)  # type: ignore[arg-type]
        return replace(made, sequence_parallel=made.tensor > 1)
    except ValueError:
        return None
