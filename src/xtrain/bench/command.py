"""`xtrain bench`: run races and record what came out."""

import argparse
import dataclasses
import datetime
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from xtrain.bench import machine, record, report
from xtrain.bench.options import add_arguments
from xtrain.bench.race import Race, RaceError
from xtrain.bench.race_sets import choose, list_lines, load, names
from xtrain.bench.record_files import finished, new_output, partial
from xtrain.bench.runner import run_measurement
from xtrain.bench.settings import QUICK, Settings
from xtrain.plan.checks import require_positive
from xtrain.testing import World

__all__ = ["add_arguments", "run"]


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
                record.write(made, partial(output))
    except RaceError as error:
        # The ranks' own words; the error of the World adds every rank's traceback.
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
) -> record.Record:
    """A record of this machine, today, still without measurements."""
    words = [arguments.name, *(["--quick"] if arguments.quick else [])]
    return record.Record(
        schema=record.SCHEMA,
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
    done: Sequence[record.Measurement] = (),
    rough: bool = False,
) -> Iterator[record.Measurement]:
    """Run every race at every size and world size, printing each when it is done.

    Measurements that are in `done` are not run again. A `rough` look has numbers on a
    busy machine, too, and a line that tells how busy.
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
