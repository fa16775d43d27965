"""Layouts of the trainer's tests: each choice of axes, and every schedule."""

from itertools import combinations
from typing import Any

from xtrain.plan import Layout

AXES = ("data", "tensor", "pipeline", "context", "expert")
ROWS = 8
"""Sequences of a step, of all ranks together."""


def layout_of(*axes: str, **more: Any) -> Layout:
    """Two ranks on each of these axes; a step has `ROWS` sequences."""
    sizes = {axis: 2 for axis in axes if axis != "expert"}
    if "expert" in axes:  # its ranks bring other batches: they are data ranks, too
        sizes |= {"expert": 2, "data": 4 if "data" in axes else 2}
    return Layout(**({"micro_batches": 2} | sizes | more))


def combined(count: int) -> list[Layout]:
    """Every choice of so many axes, the wrappers in turn."""
    chosen = combinations(AXES, count)
    return [layout_of(*axes, zero=n % 4) for n, axes in enumerate(chosen)]


PIPELINES = [
    Layout(pipeline=2, micro_batches=4, schedule="gpipe", data=2),
    Layout(pipeline=4, micro_batches=4, schedule="one_f_one_b", zero=1, data=2),
    Layout(pipeline=2, micro_batches=4, schedule="interleaved", chunks=2, tensor=2),
    Layout(pipeline=2, micro_batches=4, schedule="zb_h1", zero=2, data=2),
    Layout(pipeline=2, micro_batches=4, schedule="zb_v", chunks=2, zero=3, data=2),
    Layout(pipeline=2, micro_batches=4, schedule="chimera", data=2),
    Layout(pipeline=2, micro_batches=4, schedule="dualpipe", zero=1, data=2),
    Layout(pipeline=2, micro_batches=4, schedule="dualpipe_v", chunks=2, context=2),
]
OTHERS = [
    Layout(micro_batches=1),
    Layout(data=3, zero=3, micro_batches=2),
    Layout(data=8, zero=2),
    Layout(data=4, tensor=2, sequence_parallel=True, zero=1, micro_batches=2),
    Layout(data=2, tensor=4, zero=3, micro_batches=2),
    Layout(data=2, tensor=2, recompute="full", zero=3, micro_batches=2),
    Layout(tensor=2, pipeline=2, sequence_parallel=True, recompute="selective",
           micro_batches=2),
    Layout(context=3, data=2, context_way="all_gather", micro_batches=2),
    Layout(context=2, data=2, context_way="ulysses", zero=3, micro_batches=2),
    Layout(pipeline=3, data=2, zero=3, micro_batches=3),
    Layout(data=4, zero=3, replicate=2, micro_batches=2),
    Layout(data=4, tensor=2, zero=3, replicate=2, micro_batches=2),
    Layout(pipeline=2, data=4, zero=3, replicate=2, micro_batches=2),
    Layout(data=8, expert=2, zero=3, replicate=2),
    Layout(pipeline=2, data=4, tensor=2, context=2, zero=1, micro_batches=2),
]  # fmt: skip
LAYOUTS = [*combined(1), *combined(2), *combined(3), *combined(4), *combined(5),
           *PIPELINES, *OTHERS]  # fmt: skip


def name_of(layout: Layout) -> str:
    """For test ids."""
    extra = [layout.schedule] if layout.pipeline > 1 else []
    if layout.context > 1:
        extra.append(layout.context_way)
    words = [str(layout), *extra, *(["SP"] if layout.sequence_parallel else [])]
    if layout.recompute != "none":
        words.append(layout.recompute)
    return "-".join(words).replace(" ", "-")
