"""Real runs beside the simulator: two timelines, a trace of both, tables."""

from collections.abc import Sequence
from typing import Any

from xtrain.schedules import SCHEDULES, Timeline, parse_action, render_svg, simulate
from xtrain.schedules.chrome_trace import chrome_trace, timeline_of

from ... import races, runs
from ...downloads import trace_link
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...tables.training_races import steps_table
from ...values import percent, seconds
from .figures import HEADING, TITLES

Row = list[Any]
PIXELS = 0.36
"""For a millisecond: as wide as the page, so that all are drawn at one scale."""
CLOSE = {4: 0.05, 8: 0.10}
"""How far from the simulated time a step of sleeping stages may be, by ranks."""


def real_timeline(
    name: str, micro_batches: int, ran: Sequence[Sequence[Row]], messages: bool = False
) -> Timeline:
    """Rows of each rank as a timeline in milliseconds, which begins at 0.

    EvidenceError unless every action comes after those that it needs.
    """
    schedule = SCHEDULES[name](len(ran), micro_batches)
    executed = [[parse_action(text) for text, *_ in rows] for rows in ran]
    zero = min(rows[0][1] for rows in ran)
    times = [[(1e3 * (b - zero), 1e3 * (e - zero)) for _, b, e in rows] for rows in ran]
    timeline = timeline_of(schedule, executed, times, messages)
    check_order(timeline)
    return timeline


def check_order(timeline: Timeline) -> None:
    """EvidenceError if an action begins before what it needs has ended."""
    spans = {}
    for rank, actions in enumerate(timeline.schedule.actions):
        times = zip(timeline.starts[rank], timeline.ends[rank], strict=True)
        for action, span in zip(actions, times, strict=True):
            for part in action.parts:
                kind = "B" if part.kind == "BW" else part.kind
                spans[kind, part.stage, part.micro_batch] = span
    for (kind, stage, i), (begin, end) in spans.items():
        needed = {"F": ("F", stage - 1, i), "B": ("B", stage + 1, i)}.get(kind)
        if needed in spans and end < spans[needed][1]:
            raise EvidenceError(f"{stage}{kind}{i} at {begin} is before {needed}")


def simulated(name: str, ranks: int, micro_batches: int, milliseconds: float = 1.0):  # type: ignore[no-untyped-def]
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
    from .runs_real import sleeping_step_by_the_clock

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


@TABLES
def activations_measured(ranks: int = 4, micro_batches: int = 8) -> Table:
    """Most micro-batches held on each rank: simulated, and counted in a real step."""
    from .runs_real import activations_held

    ran = runs.remembered(activations_held, ranks, micro_batches)
    lines = []
    for name, title in TITLES.items():
        expected = simulated(name, ranks, micro_batches).peak_activations
        counted = tuple(held[name] for held in ran)
        if counted != expected:
            raise EvidenceError(f"{name}: {counted} counted, {expected} simulated")
        lines.append([title, *(f"{held:g}" for held in counted)])
    header = ["schedule", *(f"rank {rank}" for rank in range(ranks))]
    return Table(header, lines, "l" + "r" * ranks)


@TABLES
def time_of_a_step(
    name: str = "one_f_one_b",
    ranks: int = 2,
    micro_batches: int = 8,
    layers: int = 8,
    width: int = 256,
    sequence: int = 128,
) -> Table:
    """Where each rank's time goes in a step of a decoder."""
    from .runs_real import decoder_step_by_the_clock

    ran = runs.remembered(
        decoder_step_by_the_clock, ranks, name, micro_batches, layers, width, sequence
    )
    real_timeline(name, micro_batches, ran)
    begin = min(rows[0][1] for rows in ran)
    span = max(rows[-1][2] for rows in ran) - begin
    lines = []
    for rank, rows in enumerate(ran):
        spent = {"compute": 0.0, "RECV": 0.0, "SEND": 0.0}
        for text, start, end in rows:
            kind = parse_action(text).kind.partition("_")[0]
            spent[kind if kind in spent else "compute"] += end - start
        rest = span - sum(spent.values())
        shares = [percent(time / span, 1) for time in (*spent.values(), rest)]
        lines.append([f"rank {rank}", seconds(span), *shares])
    header = ["", "step", "computes", "waits for a message", "posts sends", "rest"]
    return Table(header, lines, "lrrrrr")


# ------------------------------------------------------------ stages that sleep


def sleeping_seconds(ranks: int, contestant: str) -> float:
    """The recorded time of a step of sleeping stages."""
    from xtrain.bench.races.lc5 import SLEEP

    return races.race_seconds("lc5", "sleeping", contestant, SLEEP, ranks)


def simulated_seconds(name: str, ranks: int) -> float:
    """The time that the simulator says for it."""
    from xtrain.bench.race import Case
    from xtrain.bench.races.lc5 import SLEEP, made, part_seconds

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
    from xtrain.bench.races.lc5 import LIKE, torch_name

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
    """Model and batch of each raced step."""
    from xtrain.bench.races.lc5 import SHAPES, SIZES

    return steps_table([(name, SHAPES[name], size) for name, size in SIZES.items()])
