"""Steps of ZeRO as lists of events, for the timelines of lc3.

An event is [what, number, seconds since the step began]; the number is that of a layer
of the tower, which is one unit of stage 3 and one bucket of stages 1 and 2. Every
function runs on every rank, and takes the fastest of a few steps.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER, RING, TORCH
from xtrain.comm.work import Work

from .runs import LAYERS, Looking, Tower, Training

Event = list[Any]
STEPS = 12  # the first one learns the order of the units, and warms the connections


class Clock:
    """Writes down what happens, to which layer, and when."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.zero = 0.0
        self.watchers: list[Thread] = []

    def start(self) -> None:
        self.events, self.zero = [], time.perf_counter()

    def stop(self) -> list[Event]:
        """All events since `start`, in order of time."""
        for watcher in self.watchers:
            watcher.join()
        self.watchers.clear()
        return sorted(self.events, key=lambda event: event[2])

    def note(self, what: str, number: int) -> None:
        self.events.append([what, number, time.perf_counter() - self.zero])

    def collective(
        self, name: str, call: Callable[..., Any], number_of: Callable[..., int]
    ) -> Callable[..., Work]:
        """torch's collective; notes when it begins, is done, and was waited for."""

        def issue(output: Tensor, input: Tensor, group: Any = None) -> Work:
            number = number_of(output, input)
            self.note(name, number)
            work = call(output, input, group=group, async_op=True)
            self.watchers.append(
                Thread(target=self._note_done, args=(work, name, number))
            )
            self.watchers[-1].start()
            return Work([work], lambda: self.note(f"{name} waited", number), input)

        return issue

    def _note_done(self, work: dist.Work, name: str, number: int) -> None:
        work.wait()
        self.note(f"{name} done", number)

    def watch_layers(self, layers: nn.ModuleList) -> None:
        """Note the begin and end of each layer's forward, and its backward's begin."""
        for number, layer in enumerate(layers):
            layer.forward = self._watched(layer.forward, number)

    def _watched(self, forward: Callable[..., Tensor], number: int) -> Any:
        def call(*inputs: Tensor) -> Tensor:
            self.note("forward", number)
            y = forward(*inputs)
            self.note("forward ends", number)
            return Looking.apply(y, lambda: self.note("backward", number))

        return call


def fastest(clock: Clock, training: Training, tokens: int) -> list[Event]:
    """The events of one step, in order: the fastest of those after the first."""
    steps = []
    for _ in range(STEPS):
        dist.barrier()
        clock.start()
        training.forward(tokens).backward()
        clock.note("backward over", 0)
        training.optimizer.step()
        clock.note("step over", 0)
        training.optimizer.zero_grad()
        steps.append(clock.stop())
    return min(steps[1:], key=lambda events: events[-1][2])


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


def calls_by_phase(stage: str) -> list[Event]:
    """The collectives of a step over our ring: [phase, name, bytes this rank sends].

    The second step: the first forward learns the order that the prefetch follows.
    """
    calls: list[Event] = []
    phase = "forward"
    ledger = CommLedger()

    def counted(name: str, call: Callable[..., Work]) -> Callable[..., Work]:
        def collective(*tensors: Tensor, **options: Any) -> Work:
            before = ledger.bytes_sent
            work = call(*tensors, **options)
            calls.append([phase, name, ledger.bytes_sent - before])
            return work

        return collective

    spy = replace(
        RING,
        name="counted",
        all_reduce=counted("all-reduce", RING.all_reduce),
        reduce_scatter=counted("reduce-scatter", RING.reduce_scatter),
        all_gather=counted("all-gather", RING.all_gather),
    )
    training = Training(stage, spy)
    with ledger:
        for _ in range(2):
            calls.clear()
            phase = "forward"
            loss = training.forward()
            phase = "backward"
            loss.backward()
            phase = "step"
            training.optimizer.step()
            training.optimizer.zero_grad()
    return calls


def parts_held(stage: str) -> dict[str, list[list[int]]]:
    """Which elements of the model a rank holds, as ranges, when backward has ended.

    Element i of the tower begins with a value that tells i, so a tensor's first values
    tell where it lies. Two layers make a bucket.
    """
    tower = Tower()
    parameters = list(tower.parameters())
    total = sum(p.numel() for p in parameters)
    scale = 2.0**-24
    at = 0
    for parameter in parameters:
        parameter.data = (torch_range(at, parameter) * scale).view_as(parameter)
        at += parameter.numel()
    cap = 2 * total * 4 / LAYERS / 1024
    training = Training(stage, tower=tower, cap_kib=cap)
    places = {}
    for tensor in (*training.model.parameters(), *optimized(training)):
        flat = tensor.detach().flatten()
        if flat.numel():
            start = round(flat[0].item() / scale)
            assert (flat == torch_range(start, flat) * scale).all()
            places[tensor] = [start, start + flat.numel()]
    training.step()
    training.backward()
    model = list(training.model.parameters())
    graded = [p for p in {*model, *optimized(training)} if p.grad is not None]
    return {
        "weights": joined([places[p] for p in model if p in places]),
        "gradients": joined([places[p] for p in graded if p in places]),
        "optimizer state": joined(
            [places[p] for p in training.inner.state if p in places]
        ),
    }


def torch_range(start: int, like: Tensor) -> Tensor:
    """start, start + 1, ... as many as `like` has elements, in float32."""
    return torch.arange(start, start + like.numel()).float()


def optimized(training: Training) -> list[nn.Parameter]:
    """What the inner optimizer steps."""
    return [p for group in training.inner.param_groups for p in group["params"]]


def joined(ranges: list[list[int]]) -> list[list[int]]:
    """The same elements in as few ranges as possible, in order."""
    result: list[list[int]] = []
    for start, stop in sorted(ranges):
        if result and start == result[-1][1]:
            result[-1][1] = stop
        else:
            result.append([start, stop])
    return result
