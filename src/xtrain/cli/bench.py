"""`xtrain bench`: run races and record what came out."""

import argparse
import dataclasses
import datetime
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from xtrain.bench import machine, report
from xtrain.bench.race import Race, RaceError
from xtrain.bench.race_record import (
    SCHEMA,
    Measurement,
    Record,
    finished,
    new_output,
    partial,
    write,
)
from xtrain.bench.race_sets import choose, list_lines, load, names
from xtrain.bench.runner import run_measurement
from xtrain.bench.sampling import QUICK, Settings
from xtrain.plan.checks import require_positive
from xtrain.testing import World

MOST_RANKS, MOST_BYTES = 64, 2**36
UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `xtrain bench`."""
    full, quick = Settings(), QUICK
    add = parser.add_argument
    add("name", nargs="?", help="which set of races, such as lc1 (see --list)")
    add("--list", action="store_true", help="show all races")
    add("--quick", action="store_true", help="few short samples, nothing written")
    add("--race", action="append", metavar="NAME", help="this race only; repeatable")
    add(
        "--ranks",
        type=numbers,
        metavar="N,N",
        help="numbers of ranks instead of the race's own",
    )
    add(
        "--sizes",
        type=sizes,
        metavar="S,S",
        help="sizes instead of the race's own, such as 4KiB,16MiB",
    )
    add(
        "--rounds",
        type=int,
        metavar="N",
        help=f"samples wanted of each contestant (default: {full.rounds}, with "
        f"--quick {quick.rounds})",
    )
    add(
        "--other-load-limit",
        type=float,
        metavar="SHARE",
        help="drop samples during which others used more of the machine than this "
        f"(default: {full.other_load_limit:g}, with --quick "
        f"{quick.other_load_limit:g} while some are left)",
    )
    add(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the record; by default docs/data/bench/NAME.json of the "
        "checkout for a full run, nowhere for a part of one",
    )
    add(
        "--another",
        action="store_true",
        help="this is another machine than that of the record: write NAME-2.json, or "
        "the next number, and leave the others; pages show what all machines gave",
    )
    add("--resume", action="store_true",
        help="keep the measurements of that record that have enough samples, run the "
        "others: for machines that are quiet only now and then")  # fmt: skip


def numbers(text: str) -> list[int]:
    """`2,4`: numbers of ranks, 64 at most, as each is a process."""
    found = [int(part) for part in text.split(",")]
    if not all(1 <= ranks <= MOST_RANKS for ranks in found):
        raise argparse.ArgumentTypeError(
            f"{text!r}: numbers of ranks are from 1 to {MOST_RANKS}"
        )
    return found


def sizes(text: str) -> list[int]:
    """`4KiB,16MiB` in bytes."""
    found = [parse_size(part) for part in text.split(",")]
    if not all(1 <= size <= MOST_BYTES for size in found):
        raise argparse.ArgumentTypeError(f"{text!r}: sizes are from 1 B to 64 GiB")
    return found


def parse_size(text: str) -> int:
    """`16MiB` as 16777216. Units: B, KiB, MiB, GiB."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16MiB")
    return int(match[1]) * unit


def run(arguments: argparse.Namespace) -> int:
    """Run the races that were asked for; 1 when one was refused."""
    if arguments.list:
        print("\n".join(list_lines()))
        return 0
    if arguments.name not in names():
        given = "which races?"
        if arguments.name:
            given = f"no races {arguments.name[:40]!r};"
        raise ValueError(f"{given} there are: {', '.join(names())}")
    module = load(arguments.name)
    chosen = choose(module.RACES, arguments.race, arguments.ranks, arguments.sizes)
    settings, output = _settings(arguments), _output(arguments)
    made = _new_record(arguments, module.TITLE, settings, with_facts=output is not None)
    try:
        done = finished(made, output) if arguments.resume else []
        for measurement in run_races(chosen, settings, done, arguments.quick):
            made.measurements.append(measurement)
            if output is not None:
                write(made, partial(output))
    except RaceError as error:
        # The ranks' own message; the error of the World adds every rank's traceback.
        print(f"not timed: {error.__cause__ or error}", file=sys.stderr)
        return 1
    if output is not None:
        partial(output).replace(output)
        print(f"written: {output}")
    return 0


def _output(arguments: argparse.Namespace) -> Path | None:
    """Where the record goes; None for a part of a run that names no file."""
    is_part = arguments.quick or arguments.race or arguments.ranks or arguments.sizes
    if arguments.output is not None and arguments.output.is_dir():
        raise ValueError(f"--output {arguments.output} is a folder: name a file in it")
    if arguments.output is not None or is_part:
        return arguments.output
    folder = checkout() / "docs" / "data" / "bench"
    return new_output(folder, arguments.name, arguments.another)


def _new_record(
    arguments: argparse.Namespace, title: str, settings: Settings, with_facts: bool
) -> Record:
    """A record of this machine, today, still without measurements."""
    words = [arguments.name, *(["--quick"] if arguments.quick else [])]
    return Record(
        schema=SCHEMA,
        name=arguments.name,
        title=title,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=shlex.join(["xtrain", "bench", *words]),
        machine=machine.describe(),
        versions=machine.versions(),
        settings=dataclasses.asdict(settings),
        measurements=[],
        facts=machine.facts() if with_facts else {},
    )


def run_races(
    chosen: Sequence[Race],
    settings: Settings,
    done: Sequence[Measurement] = (),
    rough: bool = False,
) -> Iterator[Measurement]:
    """Run every race at every size and world size, printing each when it is done.

    Measurements that are in `done` are not run again. A `rough` run has numbers on a
    busy machine, too, and a line with its other load.
    """
    known = {
        (measurement.race, measurement.size, measurement.ranks): measurement
        for measurement in done
    }
    places = sorted({(race.backend, ranks) for race in chosen for ranks in race.ranks})
    for backend, ranks in places:
        with World(ranks, backend) as world:
            for race in chosen:
                if race.backend != backend or ranks not in race.ranks:
                    continue
                for size in race.sizes:
                    measurement = known.get((race.name, size, ranks))
                    if measurement is None:
                        measurement = run_measurement(
                            world, race, size, settings, rough
                        )
                        lines = report.measurement_lines(measurement)
                        if rough:
                            lines += report.caveat_lines(measurement, settings)
                        print("\n".join(lines), end="\n\n", flush=True)
                    yield measurement


def checkout() -> Path:
    """The folder of this checkout; the current folder when installed elsewhere."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "docs" / "data").is_dir() else Path.cwd()


def _settings(arguments: argparse.Namespace) -> Settings:
    settings = QUICK if arguments.quick else Settings()
    for name in ("rounds", "other_load_limit"):
        if getattr(arguments, name) is not None:
            require_positive(f"--{name.replace('_', '-')}", getattr(arguments, name))
    if arguments.rounds is not None:
        settings = dataclasses.replace(
            settings, rounds=arguments.rounds, most_rounds=3 * arguments.rounds
        )
    if arguments.other_load_limit is not None:
        settings = dataclasses.replace(
            settings, other_load_limit=arguments.other_load_limit
        )
    return settings
