"""Steps of ZeRO as lists of events, for the timelines of lc3.

An event is [what, number, seconds since the step began]; the number is that of a layer
of the tower, which is one unit of stage 3 and one bucket of stages 1 and 2. Every
function runs on every rank, and takes the fastest of a few steps.
"""

from dataclasses import replace
from typing import Any

from torch import Tensor

from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER, TORCH

from .runs_clock import Clock, Event, fastest
from .runs_training import Tower, Training


def fsdp_step_by_the_clock(layers: int, width: int, tokens: int) -> list[Event]:
    """A step of stage 3, each layer a unit.

    What: an "unshard" is issued, "done" and "waited" for; "forward" and "backward" of a
    layer begin and end; full weights are gone with "reshard"; a "reduce-scatter" is
    issued, done and waited for.
    """
    clock = Clock()
    ready: list[int] = []  # whose gradients are complete: they are reduced in turn

    def unit_of(full: Tensor, _: Tensor) -> int:
        address = full.data_ptr()
        places = [unit.flat_groups[0].full.data_ptr() for unit in units]
        return places.index(address)

    spy = replace(
        TORCH,
        name="clock",
        all_gather=clock.collective("unshard", ALL_GATHER, unit_of),
        reduce_scatter=clock.collective(
            "reduce-scatter", REDUCE_SCATTER, lambda *_: ready.pop(0)
        ),
    )
    tower = Tower(layers, width)
    training = Training("3", spy, width=width, tower=tower)
    units = training.model.units[1:]  # nothing belongs to the root
    for number, unit in enumerate(units):
        watch_unit(clock, unit, number, ready)
    clock.watch_layers(tower.layers)
    return fastest(clock, training, tokens)


def watch_unit(clock: Clock, unit: Any, number: int, ready: list[int]) -> None:
    """Note when its backward ends and when its full weights are freed."""
    (group,) = unit.flat_groups
    leave, reshard = unit.leave_backward, group.reshard

    def leave_backward(*arguments: Any) -> None:
        clock.note("backward ends", number)
        ready.append(number)
        leave(*arguments)

    def free() -> None:
        if group.full.untyped_storage().nbytes():
            clock.note("reshard", number)
        reshard()

    unit.leave_backward, group.reshard = leave_backward, free


def zero_step_by_the_clock(
    stage: str, layers: int, width: int, tokens: int
) -> list[Event]:
    """A step of stage 1 or 2, each layer a bucket.

    What: "forward" and "backward" of a layer begin and end; a "reduce-scatter" is
    issued, done and waited for, and the gradients of its bucket are whole until then;
    the rank's shards take their "step", which ends; an "all-gather" is issued, done and
    waited for.
    """
    clock = Clock()
    tower = Tower(layers, width)
    spy = replace(
        TORCH,
        name="clock",
        reduce_scatter=clock.collective(
            "reduce-scatter",
            REDUCE_SCATTER,
            lambda _, whole: find([b.full_grad for b in buckets], whole),
        ),
        all_gather=clock.collective(
            "all-gather",
            ALL_GATHER,
            lambda flat, _: find([b.flat for b in buckets], flat),
        ),
    )
    size = sum(p.numel() for p in tower.layers[0].parameters()) * 4
    for number, layer in enumerate(tower.layers):  # before the optimizer's own hooks
        layer.input_layernorm.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: clock.note("backward ends", number)
        )
    training = Training(stage, spy, width=width, tower=tower, cap_kib=size / 1024)
    buckets = training.sharded
    clock.watch_layers(tower.layers)
    step = training.inner.step

    def stepped(*arguments: Any) -> Any:
        clock.note("step", 0)
        result = step(*arguments)
        clock.note("step ends", 0)
        return result

    training.inner.step = stepped
    return fastest(clock, training, tokens)


def find(tensors: list[Tensor | None], wanted: Tensor) -> int:
    """Which of the tensors it is."""
    (number,) = (i for i, tensor in enumerate(tensors) if tensor is wanted)
    return number
