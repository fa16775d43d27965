"""Real steps beside simulated ones: timelines, a trace of both, sleeping stages."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.bench.race import Case
from xtrain.bench.races.lc5 import (
    LIKE,
    SHAPES,
    SIZES,
    SLEEP,
    made,
    part_seconds,
    torch_name,
)
from xtrain.bench.sleeping import SleepingLayer
from xtrain.pipeline_parallel import PipelineRunner, PipelineStage
from xtrain.schedules import SCHEDULES, Timeline, parse_action, render_svg, simulate
from xtrain.schedules.chrome_trace import chrome_trace, timeline_of

from ... import races, runs
from ...amounts import percent, seconds
from ...downloads import trace_link
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...tables.training_races import steps_table
from .common import HEADING, TITLES

Row = list[Any]
"""[action, begin, end], in seconds by one clock for all ranks."""
PIXELS = 0.36
"""For a millisecond: as wide as the page, so that all are drawn at one scale."""
CLOSE = {4: 0.05, 8: 0.10}
"""How far from the simulated time a step of sleeping stages may be, by ranks."""
WIDTH, STEPS = 16, 5


def sleeping_step_by_the_clock(
    name: str, micro_batches: int, milliseconds: float
) -> list[Row]:
    """On every rank: what it did in a step whose F, B and W sleep so long.

    The chunks of a rank share the time. It is the step that took all ranks the least
    time, and not the first, which negotiates shapes.
    """
    schedule = SCHEDULES[name](dist.get_world_size(), micro_batches)
    sleeps = milliseconds / 1e3 / schedule.chunks
    stages = [
        PipelineStage(nn.Sequential(SleepingLayer(WIDTH, sleeps)), s, schedule.stages)
        for s in schedule.stages_of(dist.get_rank())
    ]
    runner = PipelineRunner(stages, schedule, squares)
    batch = torch.ones(micro_batches, WIDTH)
    runner.step(batch, batch)
    steps, spans = [], []
    for _ in range(STEPS):
        runner.step(batch, batch)
        did = zip(runner.executed, runner.times, strict=True)
        steps.append([[str(action), begin, end] for action, (begin, end) in did])
        ends = torch.tensor([-runner.times[0][0], runner.times[-1][1]]).double()
        dist.all_reduce(ends, dist.ReduceOp.MAX)
        spans.append(float(ends.sum()))
    return steps[spans.index(min(spans))]


def squares(output: Tensor, target: Tensor) -> tuple[Tensor, int]:
    return (output - target).square().sum(), target.numel()


def real_timeline(
    name: str, micro_batches: int, ran: Sequence[Sequence[Row]], messages: bool = False
) -> Timeline:
    """Rows of each rank as a timeline in milliseconds, which begins at 0."""
    schedule = SCHEDULES[name](len(ran), micro_batches)
    executed = [[parse_action(text) for text, *_ in rows] for rows in ran]
    zero = min(rows[0][1] for rows in ran)
    times = [[(1e3 * (b - zero), 1e3 * (e - zero)) for _, b, e in rows] for rows in ran]
    return timeline_of(schedule, executed, times, messages)


def simulated(
    name: str, ranks: int, micro_batches: int, milliseconds: float
) -> Timeline:
    """The schedule with these times of a rank's part."""
    schedule = SCHEDULES[name](ranks, micro_batches)
    part = milliseconds / schedule.chunks
    return simulate(schedule, part, part, part)


@FIGURES
def real_and_simulated(
    name: str = "one_f_one_b",
    ranks: int = 4,
    micro_batches: int = 8,
    milliseconds: float = 50.0,
) -> str:
    """A real step of sleeping stages below the simulated one; both as a trace."""
    ran = runs.remembered(
        sleeping_step_by_the_clock, ranks, name, micro_batches, milliseconds
    )
    wanted = simulated(name, ranks, micro_batches, milliseconds)
    real = real_timeline(name, micro_batches, ran)
    parts = []
    for what, timeline in (("simulated", wanted), ("real", real)):
        words = f"{TITLES[name]}, {what}: {timeline.makespan:.0f} ms"
        drawing = render_svg(timeline, words, scale=PIXELS)
        parts.append(f'<p style="{HEADING}">{words}</p>{drawing}')
    with_messages = real_timeline(name, micro_batches, ran, messages=True)
    trace = chrome_trace({"real": with_messages, "simulated": wanted}, 1e-3)
    name = f"{name}_real_and_simulated.json"
    return "".join(parts) + trace_link(trace, name, HEADING)


def sleeping_seconds(ranks: int, contestant: str) -> float:
    """The recorded time of a step of sleeping stages."""
    return races.race_seconds("lc5", "sleeping", contestant, SLEEP, ranks)


def simulated_seconds(name: str, ranks: int) -> float:
    """Its simulated time."""
    part = 1e3 * part_seconds(Case(SLEEP, ranks))
    m = made(name, None, ranks).micro_batches
    return simulated(name, ranks, m, part).makespan / 1e3


@TABLES
def sleeping_steps(ranks: int = 4) -> Table:
    """Every schedule with stages that sleep: simulated and measured."""
    lines = []
    for name, title in TITLES.items():
        wanted, took = simulated_seconds(name, ranks), sleeping_seconds(ranks, name)
        off = took / wanted - 1
        verdict = "" if abs(off) <= CLOSE[ranks] else "**missed**"
        lines.append(
            [title, seconds(wanted), seconds(took), percent(off, 1), verdict]
        )  # fmt: skip
    header = ["schedule", "simulated", "measured", "difference", ""]
    return Table(header, lines, "lrrrl")


@TABLES
def sleeping_against_torch(ranks: int = 4) -> Table:
    """The same step by torch's schedules, each beside ours on the same stages."""
    lines = []
    for theirs, _, name in LIKE.values():
        ours = sleeping_seconds(ranks, name)
        took = sleeping_seconds(ranks, torch_name(theirs))
        lines.append(
            [torch_name(theirs), seconds(took), TITLES[name], seconds(ours),
             f"{took / ours:.2f}x"]
        )  # fmt: skip
    header = ["torch", "its step", "ours", "our step", "times as fast"]
    return Table(header, lines, "lrlrr")


@TABLES
def pipeline_steps() -> Table:
    """Model and batch of each step that is raced on the benchmarks' page."""
    return steps_table([(name, SHAPES[name], size) for name, size in SIZES.items()])
