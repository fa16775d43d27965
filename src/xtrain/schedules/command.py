"""`xtrain schedule`: a pipeline schedule in the terminal, as a picture or as data."""

import argparse
import difflib
import json
import sys
from pathlib import Path

from xtrain.schedules import SCHEDULES, simulate, validate
from xtrain.schedules.draw import render_svg, render_text
from xtrain.schedules.simulate import Timeline

TIMES = {
    "forward": 1.0,
    "backward_input": 1.0,
    "backward_weight": 1.0,
    "p2p": 0.0,
    "all_to_all": 0.0,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The words after `xtrain schedule`."""
    parser.add_argument("name", metavar="NAME", help=", ".join(SCHEDULES))
    parser.add_argument("--stages", type=int, default=4, help="ranks of the pipeline")
    parser.add_argument("--micro-batches", type=int, default=8)
    parser.add_argument("--chunks", type=int, help="parts a rank, of `interleaved`")
    for name, default in TIMES.items():
        words = f"time of one stage, {default:g} by default"
        if name == "all_to_all":
            words = "what experts' exchange adds to a forward, and to a backward"
        elif name == "p2p":
            words = "time of a message to the next stage"
        parser.add_argument(
            f"--{name.replace('_', '-')}", type=float, default=default, help=words
        )
    parser.add_argument("--overlapped", type=float, help="time of an overlapped pair")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="draw it into a file")
    parser.add_argument("--json", action="store_true", help="every action with times")


def run(arguments: argparse.Namespace) -> int:
    """Make, check, time and show a schedule; 2 for sizes that cannot be."""
    try:
        timeline = _timeline(arguments)
    except ValueError as error:
        print(f"xtrain schedule: {error}", file=sys.stderr)
        return 2
    if arguments.svg:
        arguments.svg.write_text(render_svg(timeline))
    if arguments.json:
        print(json.dumps(as_data(timeline)))
        return 0
    print(render_text(timeline))
    print()
    for name, value in figures(timeline).items():
        print(f"{name:<38} {value}")
    if arguments.svg:
        print(f"\ndrawn into {arguments.svg}")
    return 0


def _timeline(arguments: argparse.Namespace) -> Timeline:
    name = arguments.name.replace("-", "_").lower()
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, 3, 0.4) or list(SCHEDULES)
        raise ValueError(
            f"no schedule {arguments.name!r}; did you mean {', '.join(near)}?"
        )
    options = {}
    if arguments.chunks is not None:
        if name != "interleaved":
            raise ValueError(f"--chunks belongs to interleaved, not to {name}")
        options["chunks"] = arguments.chunks
    schedule = SCHEDULES[name](arguments.stages, arguments.micro_batches, **options)
    validate(schedule)
    times = {time: getattr(arguments, time) for time in TIMES}
    return simulate(schedule, overlapped=arguments.overlapped, **times)


def figures(timeline: Timeline) -> dict[str, str]:
    """The numbers by which schedules are compared."""
    peaks = " ".join(f"{peak:g}" for peak in timeline.peak_activations)
    return {
        "time of the step": f"{timeline.makespan:g}",
        "work of a rank": f"{timeline.work:g}",
        "idle, per rank": " ".join(f"{idle:g}" for idle in timeline.idle),
        "bubble over ideal time": f"{timeline.bubble_over_ideal:.4f}",
        "bubble over all time": f"{timeline.idle_fraction:.4f}",
        "activations at most (micro-batches)": peaks,
        "copies of the weights": f"{timeline.parameter_copies}",
    }


def as_data(timeline: Timeline) -> dict[str, object]:
    """The timeline for other programs."""
    schedule = timeline.schedule
    return {
        "name": schedule.name,
        "ranks": schedule.ranks,
        "micro_batches": schedule.micro_batches,
        "chunks": schedule.chunks,
        "placement": schedule.placement,
        "makespan": timeline.makespan,
        "work": timeline.work,
        "idle": timeline.idle,
        "bubble_over_ideal": timeline.bubble_over_ideal,
        "idle_fraction": timeline.idle_fraction,
        "peak_activations": timeline.peak_activations,
        "parameter_copies": timeline.parameter_copies,
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
