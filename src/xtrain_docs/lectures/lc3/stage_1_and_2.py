"""Which elements a rank holds in stages 1 and 2, and when buckets move."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from xtrain.comm.collective_choice import ALL_GATHER, REDUCE_SCATTER, TORCH

from ... import runs
from ...figures import REGISTRY
from ...svg import document, rect, swatches, text
from .common import EDGE, KINDS, LAYERS, WIDTH, Tower, Training
from .timeline import LAYERS as ROWS
from .timeline import MODEL_WIDTH, TOKENS, Clock, Step, most_at_once, timeline

KEYS = {
    "all-gather": "all-gather of weights",
    "whole": "whole gradients",
    "forward backward step": "F, B, step S",
    "reduce-scatter": "reduce-scatter",
}
SCALE = 2.0**-24


def parts_held(stage: str) -> list[list[list[int]]]:
    """Of each of KINDS, the ranges of elements that a rank has when backward is over.

    Element i of the model is i / 2^24, so a tensor's first value is its place.
    """
    tower = Tower()
    parameters = list(tower.parameters())
    numbers = torch.arange(tower.size) * SCALE
    values = numbers.split([p.numel() for p in parameters])
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data = value.view_as(parameter).clone()
    two_layers = 2 * numbers.nbytes / LAYERS / 2**20
    training = Training(stage, tower=tower, cap_mb=two_layers)
    model = list(training.model.parameters())
    known = {p: p.detach().flatten() for p in (*model, *training.stepped)}
    starts = {p: round(v[0].item() / SCALE) for p, v in known.items() if v.numel()}
    training.second_backward()

    def ranges(tensors: Any) -> list[list[int]]:
        held = torch.zeros(tower.size + 2, dtype=torch.int)
        for tensor in tensors:
            if tensor in starts:
                held[starts[tensor] + 1 :][: tensor.numel()] = 1
        edges: list[list[int]] = held.diff().nonzero().view(-1, 2).tolist()
        return edges

    graded = [p for p in known if p.grad is not None]
    return [ranges(model), ranges(graded), ranges(training.inner.state)]


@REGISTRY
def zero_parts(ranks: int = 4) -> str:
    """Strips of the whole model for each rank: what it holds when backward is over."""
    total, left, strip = Tower().size, 56, 9
    scale = (EDGE - left) / total
    parts, _ = swatches(KINDS, y=4, apart=40, radius=2)
    y, words = 28.0, []
    for stage in ("1", "2"):
        parts.append(text(6, y + 10, f"stage {stage}", "xt-label"))
        y += 18
        for rank, held in enumerate(runs.remembered(parts_held, ranks, stage)):
            parts.append(text(left - 8, y + 18, f"rank {rank}", "xt-tick", "end"))
            for colour, ranges in enumerate(held):
                parts.append(rect(left, y, EDGE - left, strip - 1, None, radius=2))
                for start, stop in ranges:
                    at, wide = left + start * scale, (stop - start) * scale
                    parts.append(rect(at, y, wide, strip - 1, colour, radius=2))
                y += strip
            y += 8
        shares = (sum(b - a for a, b in ranges) / total for ranges in held)
        shown = map("{:g} of the {}".format, shares, KINDS)
        words.append(f"stage {stage}: each rank holds {', '.join(shown)}")
    return document(WIDTH, y, parts, "What each rank holds", "; ".join(words))


def zero_step_by_the_clock(stage: str, layers: int, width: int, tokens: int) -> Step:
    """A step of stage 1 or 2, each layer a bucket, by this rank's clock.

    The gradients of a bucket are whole until its reduce-scatter was waited for.
    """
    clock = Clock()

    def row_of(name: str, wanted: Tensor) -> int:
        return [getattr(b, name) is wanted for b in training.buckets].index(True)

    spy = replace(
        TORCH,
        name="clock",
        reduce_scatter=clock.collective(
            "reduce-scatter",
            REDUCE_SCATTER,
            lambda _, whole: row_of("full_grad", whole),
            lambda row: clock.end("whole", row),
        ),
        all_gather=clock.collective(
            "all-gather", ALL_GATHER, lambda flat, _: row_of("flat", flat)
        ),
    )
    tower = Tower(layers, width)
    for row, layer in enumerate(tower.layers):  # its first norm is the last in backward
        layer.input_layernorm.weight.register_post_accumulate_grad_hook(
            lambda _, row=row: clock.end("backward", row)
        )
    one_layer = 4 * tower.size / layers / 2**20
    training = Training(stage, spy, tower, cap_mb=one_layer)
    clock.watch(tower.layers, "whole")
    step = training.inner.step

    def stepped(*arguments: Any) -> None:
        for row in range(layers):
            clock.begin("step", row)
        step(*arguments)
        for row in range(layers):
            clock.end("step", row)

    training.inner.step = stepped
    return clock.fastest_step(training, tokens)


@REGISTRY
def zero_timeline() -> str:
    """A step of stage 1 and one of stage 2 by rank 0's clock: a row for each bucket."""
    steps = {
        f"stage {stage}": runs.remembered(
            zero_step_by_the_clock, 2, stage, ROWS, MODEL_WIDTH, TOKENS
        )[0]
        for stage in ("1", "2")
    }
    words = (
        f"{name} has {most_at_once(step, 'whole')} buckets of whole gradients at most"
        for name, step in steps.items()
    )
    title = "A step of stages 1 and 2 over time"
    return timeline(steps, "bucket", KEYS, title, "; ".join(words))
