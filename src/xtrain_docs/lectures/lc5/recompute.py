"""Activation recompute: what is alive over a step, by size of the segments."""

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.model import XtrainConfig
from xtrain.model.modules import PlainModules
from xtrain.pipeline_parallel import checkpoint
from xtrain.testing.live import LiveStorages
from xtrain.testing.saved import SavedTensors

from ... import runs
from ...figures import REGISTRY
from ...svg import Axis, line_chart
from ...values import value

MIB = 2**20
TITLES = {0: "no recompute", 1: "each layer", 2: "segments of 2 layers"}
BATCH, SEQUENCE, HIDDEN = 2, 48, 96
CONFIG = XtrainConfig(
    vocab_size=8, hidden_size=HIDDEN, intermediate_size=256, num_hidden_layers=1,
    num_attention_heads=12, num_key_value_heads=4,
)  # fmt: skip
Events = list[tuple[str, int]]


def layers_and_input(count: int) -> tuple[nn.ModuleList, Tensor]:
    """Layers of an `XtrainModel`, in fp32."""
    torch.manual_seed(0)
    parts = PlainModules(CONFIG, F.scaled_dot_product_attention)
    layers = nn.ModuleList(parts.layer() for _ in range(count))
    return layers, torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)


def segments(layers: nn.ModuleList, each: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """The layers as functions of so many of them."""
    positions = torch.arange(SEQUENCE)

    def run(part: list[nn.Module], x: Tensor) -> Tensor:
        for layer in part:
            x = layer(x, positions)
        return x

    for start in range(0, len(layers), each):
        yield partial(run, list(layers)[start : start + each])


def kept_bytes(count: int, each: int) -> int:
    """Bytes that the forward of `count` layers keeps, by segments of `each`.

    With `each` 0 without recompute.
    """
    layers, x = layers_and_input(count)
    with SavedTensors() as saved:
        for segment in segments(layers, each or 1):
            x = checkpoint(segment, x) if each else segment(x)
    return saved.nbytes(but=layers.parameters())


def live_bytes(count: int, each: int) -> Events:
    """Bytes of activations and their gradients at every end of a layer's run.

    Runs are "forward", "again" and "backward". Recompute is by segments of `each`; with
    `each` 0 there is none.
    """
    layers, x = layers_and_input(count)
    live, found = LiveStorages(), []

    def note(kind: str) -> None:
        gradients = [p.grad for p in layers.parameters() if p.grad is not None]
        found.append((kind, live.nbytes([*layers.parameters(), *gradients])))

    def after_forward(*_: Any) -> None:
        in_backward = torch._C._current_graph_task_id() >= 0
        note("again" if in_backward else "forward")

    for layer in layers:
        layer.register_forward_hook(after_forward)
        layer.register_full_backward_hook(lambda *_: note("backward"))
    with live:
        for segment in segments(layers, each or 1):
            x = checkpoint(segment, x) if each else segment(x)
        x.sum().backward()
    return found


def placed(events: Events) -> list[tuple[float, float]]:
    """Points of a line: every forward and every backward takes one step to the right.

    Second runs lie between the backwards before and after them.
    """
    points, at, again = [], 0.0, 0
    for place, (kind, nbytes) in enumerate(events):
        if kind == "again":
            left = 0
            while events[place + left][0] == "again":
                left += 1
            again += 1
            points.append((at + again / (again + left), nbytes / MIB))
        else:
            at, again = at + 1, 0
            points.append((at, nbytes / MIB))
    return points


@REGISTRY
def recompute_memory(layers: int = 8) -> str:
    """Live activations over a forward and a backward, by size of the segments."""
    series = {
        title: placed(runs.remembered(live_bytes, 1, layers, each)[0])
        for each, title in TITLES.items()
    }
    peak = {name: max(nbytes for _, nbytes in line) for name, line in series.items()}
    words = ", ".join(f"{name}: at most {most:.1f} MiB" for name, most in peak.items())
    ticks = [0, layers / 2, layers, 1.5 * layers, 2 * layers]
    return line_chart(
        series,
        Axis("layers done: forward, then backward", low=0, ticks=ticks),
        Axis("activations that are alive, MiB", format=lambda n: f"{n:g}", low=0),
        "Activations over a forward and a backward",
        words,
        marks=[(layers, "backward begins")],
    )


@value
@cache
def recompute_kept(layers: int, each: int) -> int:
    """Bytes that a forward keeps; without recompute if `each` is 0."""
    return int(runs.remembered(kept_bytes, 1, layers, each)[0])


@value
@cache
def recompute_peak(layers: int, each: int) -> int:
    """Bytes of activations that are alive at most in a forward and a backward."""
    return max(n for _, n in runs.remembered(live_bytes, 1, layers, each)[0])
