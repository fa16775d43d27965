"""The timeline of stage 3: when each unit is gathered, used and freed."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor

from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER, TORCH

from ... import runs
from ...figures import REGISTRY
from .common import Tower, Training
from .timeline import (
    LAYERS,
    MODEL_WIDTH,
    TOKENS,
    Clock,
    Step,
    most_at_once,
    timeline,
)

KEYS = {
    "all-gather": "all-gather",
    "whole": "from unshard to reshard",
    "forward backward": "F forward, B backward",
    "reduce-scatter": "reduce-scatter",
}


def fsdp_step_by_the_clock(layers: int, width: int, tokens: int) -> Step:
    """A step of stage 3, each layer a unit, by this rank's clock."""
    clock = Clock()
    ready: list[int] = []  # whose gradients are complete: they are reduced in turn

    def gathered(full: Tensor, _: Tensor) -> int:
        places = [unit.flat_groups[0].full.data_ptr() for unit in units]
        clock.begin("whole", row := places.index(full.data_ptr()))
        return row

    def watch(unit: Any, row: int) -> None:
        (group,) = unit.flat_groups

        def backward_ends() -> None:
            clock.end("backward", row)
            ready.append(row)

        unit.leave_backward = after(backward_ends, unit.leave_backward)
        group.reshard = after(lambda: clock.end("whole", row), group.reshard)

    spy = replace(
        TORCH,
        name="clock",
        all_gather=clock.collective("all-gather", ALL_GATHER, gathered),
        reduce_scatter=clock.collective(
            "reduce-scatter", REDUCE_SCATTER, lambda *_: ready.pop(0)
        ),
    )
    tower = Tower(layers, width)
    training = Training("3", spy, tower)
    units = training.model.units[1:]  # nothing belongs to the root
    for row, unit in enumerate(units):
        watch(unit, row)
    clock.watch(tower.layers)
    return clock.fastest_step(training, tokens)


def after(first: Callable[[], None], call: Callable[..., Any]) -> Callable[..., Any]:
    """The call, after something else."""

    def both(*arguments: Any) -> Any:
        first()
        return call(*arguments)

    return both


@REGISTRY
def fsdp_timeline() -> str:
    """A step of stage 3 by rank 0's clock: a row for each unit."""
    step = runs.remembered(fsdp_step_by_the_clock, 2, LAYERS, MODEL_WIDTH, TOKENS)[0]
    words = (
        f"Each of {LAYERS} units is gathered before its forward and again before its "
        "backward, and freed after each. The next unit's all-gather is issued before "
        f"a unit computes; at most {most_at_once(step, 'whole')} units are whole at "
        "once. After its backward a unit's gradients are reduce-scattered."
    )
    return timeline({"": step}, "unit", KEYS, "A step of stage 3 over time", words)
