"""A clock for steps of ZeRO: what happens, to which layer, and when.

An event is [what, number, seconds since the step began]; the number is that of a layer
of the tower. Every function runs on every rank.
"""

import time
from collections.abc import Callable
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from xtrain.comm.work import Work

from .runs import Looking
from .runs_training import Training

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
