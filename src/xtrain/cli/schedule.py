"""`xtrain schedule`: a pipeline schedule in the terminal, as a picture or as data."""

import argparse
import difflib
import json
import math
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from xtrain.schedules import SCHEDULES, simulate, validate
from xtrain.schedules.checks import Times
from xtrain.schedules.draw import render_svg, render_text
from xtrain.schedules.simulate import Timeline

MOST_CELLS, MOST_RATIO = 100_000, 1000
TIMES = {
    "forward": 1.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
    "p2p": 0.0,
    "all_to_all": 0.0,
}

WORDS = {
    "p2p": "time of a message to the next stage",
    "all_to_all": "what experts' exchange adds to a forward, and to a backward",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `xtrain schedule`."""
    parser.add_argument("name", metavar="NAME", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step")
    parser.add_argument("--chunks", type=int, help="parts a rank, of `interleaved`")
    for name, default in TIMES.items():
        kind: Callable[[str], Times] = float if name in WORDS else times
        words = WORDS.get(name, "time of a virtual stage; 1,1,2 for one each")
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=kind, default=default, help=words
        )
    parser.add_argument(
        "--overlapped",
        type=float,
        help="time of an overlapped pair; the sum of its parts unless given",
    )
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it into a file")
    parser.add_argument("--json", action="store_true", help="every action with times")


def times(text: str) -> Times:
    """One time of all virtual stages, or one of each: 1.5 or 1,1,2."""
    found = [float(part) for part in text.split(",")]
    return found[0] if len(found) == 1 else found


def run(arguments: argparse.Namespace) -> int:
    """Make, check, time and show a schedule."""
    timeline = _timeline(arguments)
    if arguments.svg:
        arguments.svg.write_text(render_svg(timeline))
    if arguments.json:
        print(json.dumps(as_data(timeline)))
        return 0
    print(fitted(render_text(timeline)))
    print()
    for name, value in figures(timeline).items():
        print(f"{name:<38} {value}")
    if arguments.svg:
        print(f"\ndrawn into {arguments.svg}")
    return 0


def fitted(text: str) -> str:
    """The drawing, cut for a narrower terminal into pieces below each other.

    Pieces end between two actions of every rank, if there is such a place.
    """
    rows, name = text.split("\n"), len("rank 0   ")
    width = shutil.get_terminal_size().columns
    if not sys.stdout.isatty() or max(map(len, rows)) <= width:
        return text
    room, end = max(width - name, 20), max(map(len, rows))
    pieces, start = [], name
    while start < end:
        stop = start + room
        whole = (at for at in range(stop, start, -1) if _is_between(rows, at))
        stop = end if stop >= end else next(whole, stop)
        pieces.append("\n".join(f"{row[:name]}{row[start:stop]}" for row in rows))
        start = stop
    return "\n\n".join(pieces)


def _is_between(rows: list[str], at: int) -> bool:
    """Whether no row has an action on both sides of this column."""
    return all(row[at - 1 : at] in ("", " ", ".") for row in rows)


def _check_size(arguments: argparse.Namespace) -> None:
    """ValueError for more cells or a wider range of times than a drawing holds."""
    count = arguments.stages * arguments.micro_batches * max(arguments.chunks or 1, 1)
    if count > MOST_CELLS:
        raise ValueError(f"stages x micro-batches x chunks are above {MOST_CELLS}")
    given = [_each(getattr(arguments, time)) for time in (*TIMES, "overlapped")]
    spent = [time for of_one in given for time in of_one if time]
    if not any(map(any, given[:3])):
        raise ValueError("forward and backward take no time: one of them is above 0")
    if not max(spent) <= MOST_RATIO * min(map(abs, spent)) < math.inf:
        raise ValueError(
            f"times from {min(spent):g} to {max(spent):g}: the longest is at most "
            f"{MOST_RATIO} times the shortest"
        )


def _each(given: Times | None) -> Sequence[float]:
    if given is None:
        return []
    return [given] if isinstance(given, float) else given


def _timeline(arguments: argparse.Namespace) -> Timeline:
    name = arguments.name.replace("-", "_").lower()
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 3, 0.4) or list(SCHEDULES)
        raise ValueError(
            f"no schedule {arguments.name[:40]!r}; did you mean {', '.join(near)}?"
        )
    options = {}
    if arguments.chunks is not None:
        if name != "interleaved":
            raise ValueError(f"--chunks belongs to interleaved, not to {name}")
        options["chunks"] = arguments.chunks
    _check_size(arguments)
    schedule = SCHEDULES[name](arguments.stages, arguments.micro_batches, **options)
    validate(schedule)
    given = {time: getattr(arguments, time) for time in TIMES}
    return simulate(schedule, overlapped=arguments.overlapped, **given)


def figures(timeline: Timeline) -> dict[str, str]:
    """The numbers by which schedules are compared."""
    works = [f"{work:g}" for work in timeline.works]
    equal = len(set(works)) == 1
    return {
        "time of the step": f"{timeline.makespan:g}",
        "work of a rank" if equal else "work, per rank": works[0]
        if equal
        else " ".join(works),
        "idle, per rank": of_ranks(timeline.idle),
        "bubble over ideal time": f"{timeline.bubble_over_ideal:.4f}",
        "bubble over all time": f"{timeline.idle_fraction:.4f}",
        "activations at most (micro-batches)": of_ranks(timeline.peak_activations),
        "the same, counted until W": of_ranks(timeline.peak_until_weights),
        "copies of the weights": f"{timeline.parameter_copies}",
    }


def of_ranks(numbers: Sequence[float]) -> str:
    """One number a rank, with spaces between them."""
    return " ".join(f"{number:g}" for number in numbers)


def as_data(timeline: Timeline) -> dict[str, object]:
    """The timeline for other programs."""
    schedule = timeline.schedule
    sizes = "name", "ranks", "micro_batches", "chunks", "placement"
    results = (
        "makespan", "work", "works", "idle", "bubble_over_ideal", "idle_fraction",
        "peak_activations", "peak_until_weights", "parameter_copies",
    )  # fmt: skip
    return {
        **{name: getattr(schedule, name) for name in sizes},
        **{name: getattr(timeline, name) for name in results},
        "actions": [
            [
                {"action": str(action), "start": start, "end": end}
                for action, start, end in zip(actions, starts, ends, strict=True)
            ]
            for actions, starts, ends in zip(
                schedule.actions, timeline.starts, timeline.ends, strict=True
            )
        ],
    }
