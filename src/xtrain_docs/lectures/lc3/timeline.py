"""Steps of ZeRO over time: bars by rank 0's clock, in a row for each layer.

A bar is [lane, row, begin, end], in seconds since the step began; the row is that of a
layer of the tower: one unit of stage 3, one bucket of stages 1 and 2.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from threading import Thread
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from xtrain.comm.work import Work

from ...svg import TimeAxis, document, line, rect, text
from .common import WIDTH, Training

LAYERS, MODEL_WIDTH, TOKENS = 4, 256, 128
STEPS = 12  # the first one learns the order of the units, and warms the connections
LEFT, ROW, HEAD = 60, 38, 16
# offset of a bar in its row, its height, colour, opacity and words
LANES = {
    "whole": (0, 36, 5, 0.2, ""),
    "all-gather": (3, 6, 0, 1.0, ""),
    "forward": (12, 14, 2, 0.4, "F"),
    "backward": (12, 14, 6, 0.4, "B"),
    "step": (12, 14, 3, 0.4, "S"),
    "reduce-scatter": (29, 6, 1, 1.0, ""),
    "all-reduce": (0, 36, 7, 0.5, ""),
}
Step = dict[str, Any]  # its bars, and when each phase ends


class Clock:
    """Writes down what happens in which row, and when."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        self.bars: list[list[Any]] = []
        self.open: dict[tuple[str, int], float] = {}
        self.pending: list[Thread] = []
        self.zero = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.zero

    def begin(self, lane: str, row: int) -> None:
        self.open[lane, row] = self.now()

    def end(self, lane: str, row: int) -> None:
        """What has not begun does not end."""
        if (lane, row) in self.open:
            self.bars.append([lane, row, self.open.pop((lane, row)), self.now()])

    def collective(
        self,
        lane: str,
        call: Callable[..., Any],
        row_of: Callable[[Tensor, Tensor], int],
        waited: Callable[[int], None] = lambda row: None,
    ) -> Callable[..., Work]:
        """torch's collective, from its issue until it is done."""

        def end(work: dist.Work, row: int, begun: float) -> None:
            work.wait()
            self.bars.append([lane, row, begun, self.now()])

        def issue(output: Tensor, input: Tensor, group: Any = None) -> Work:
            row = row_of(output, input)
            begun = self.now()
            work = call(output, input, group=group, async_op=True)
            self.pending.append(Thread(target=end, args=(work, row, begun)))
            self.pending[-1].start()
            return Work([work], lambda: waited(row), input)

        return issue

    def watch(self, layers: nn.ModuleList, *lanes: str) -> None:
        """Every layer's forward; with its backward, `lanes` begin."""
        for row, layer in enumerate(layers):
            layer.forward = self._watched(layer.forward, row, lanes)

    def _watched(
        self, forward: Callable[..., Tensor], row: int, lanes: Sequence[str]
    ) -> Callable[..., Tensor]:
        def backward_begins(_: Tensor) -> None:
            for lane in ("backward", *lanes):
                self.begin(lane, row)

        def call(*inputs: Tensor) -> Tensor:
            self.begin("forward", row)
            y = forward(*inputs)
            self.end("forward", row)
            y.register_hook(backward_begins)
            return y.view_as(y)  # a wrapper's hooks are on this view: they come first

        return call

    def fastest_step(self, training: Training, tokens: int) -> Step:
        """Of all steps but the first."""
        steps: list[Step] = []
        for _ in range(STEPS):
            dist.barrier()
            self.restart()
            loss = training.forward(tokens)
            ends = {"forward": self.now()}
            loss.backward()
            ends["backward"] = self.now()
            training.optimizer.step()
            ends["step"] = self.now()
            training.optimizer.zero_grad()
            for thread in self.pending:
                thread.join()
            steps.append({"bars": self.bars, "ends": ends})
        return min(steps[1:], key=lambda step: step["ends"]["step"])


def most_at_once(step: Step, lane: str) -> int:
    """How many bars of a lane there are at the same time, at most."""
    spans = [(begin, end) for what, _, begin, end in step["bars"] if what == lane]
    return max(sum(a <= begin < b for a, b in spans) for begin, _ in spans)


def timeline(
    steps: Mapping[str, Step],
    row: str,
    keys: Mapping[str, str],
    title: str,
    words: str = "",
) -> str:
    """Steps by their name, one above the other; `keys`: what lanes are called."""
    layers = 1 + max(bar[1] for step in steps.values() for bar in step["bars"])
    axis = TimeAxis(max(s["ends"]["step"] for s in steps.values()), LEFT, WIDTH)
    parts, top = legend(keys), 44.0
    for name, step in steps.items():
        parts.append(text(6, top + 11, name, "xt-label"))
        parts += panel(step, [f"{row} {n}" for n in range(layers)], axis, top)
        top += HEAD + ROW * layers + 12
    parts += axis.ends(top + 6)
    return document(WIDTH, top + 12, parts, title, words)


def panel(step: Step, rows: Sequence[str], axis: TimeAxis, top: float) -> list[str]:
    """A step's bars, below the names of its phases."""
    parts, began, free = [], 0.0, 0.0
    first, bottom = top + HEAD, top + HEAD + ROW * len(rows)
    for name, ends in step["ends"].items():
        half = 3.4 * len(name)
        middle = min(axis.at((began + ends) / 2), WIDTH - 6 - half)
        middle = max(middle, free + half)  # a phase may be shorter than its name
        free = middle + half + 4
        parts.append(text(middle, top + 11, name, "xt-tick", "middle"))
        parts.append(line(axis.at(ends), top + 2, axis.at(ends), bottom, "xt-grid"))
        began = ends
    for row, name in enumerate(rows):
        parts.append(text(LEFT - 6, first + row * ROW + 23, name, "xt-tick", "end"))
    for lane, row, begin, end in sorted(step["bars"], key=lambda b: b[0] != "whole"):
        dy, height, colour, opacity, words = LANES[lane]
        y, what = first + row * ROW + dy, f"{lane}, {rows[row]}"
        parts.append(axis.bar(what, begin, end, y, height, colour, opacity))
        left, right = axis.at(begin), axis.at(end)
        if words and right - left > 10:
            middle = (left + right) / 2
            parts.append(text(middle, y + 11.5, words, "xt-label", "middle"))
    return [*parts, axis.base(bottom + 2)]


def legend(names: Mapping[str, str], columns: Sequence[int] = (6, 196)) -> list[str]:
    """A key of the lanes, each drawn as in its row; `columns` begin at x.

    Lanes that share their words stand in one name, with spaces.
    """
    parts = []
    for index, (lanes, words) in enumerate(names.items()):
        x, y = columns[index % len(columns)], 2 + 20 * (index // len(columns))
        for lane in lanes.split():
            dy, height, colour, opacity, _ = LANES[lane]
            high = max(5, 0.4 * height)
            parts.append(
                rect(x, y + dy * 0.35, 20, high, colour, opacity=opacity, radius=1)
            )
            x += 23
        parts.append(text(x + 4, y + 12, words, "xt-tick"))
    return parts
