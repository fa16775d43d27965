"""`xtrain bench`: run races and record what came out."""

import argparse
import dataclasses
import datetime
import importlib
import pkgutil
import re
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

from xtrain.bench import machine, races, record, report
from xtrain.bench.race import Race, RaceError
from xtrain.bench.runner import QUICK, Settings, run_measurement
from xtrain.testing import World

UNITS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `xtrain bench`."""
    parser.add_argument(
        "name", nargs="?", help="which set of races, such as lc1 (see --list)"
    )
    parser.add_argument("--list", action="store_true", help="show all races")
    parser.add_argument(
        "--quick", action="store_true", help="few short samples, nothing written"
    )
    parser.add_argument(
        "--race", action="append", metavar="NAME", help="this race only; repeatable"
    )
    parser.add_argument(
        "--ranks",
        type=_counts,
        metavar="N,N",
        help="numbers of ranks instead of the race's own",
    )
    parser.add_argument(
        "--sizes",
        type=_sizes,
        metavar="S,S",
        help="sizes instead of the race's own, such as 4KiB,16MiB",
    )
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="samples wanted of each contestant"
    )
    parser.add_argument(
        "--other-load-limit",
        type=float,
        metavar="SHARE",
        help="drop samples during which others used more of the machine than this",
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="where to write the record; by default docs/data/bench/NAME.json of the "
        "checkout for a full run, nowhere for a part of one",
    )
    parser.add_argument(
        "--another",
        action="store_true",
        help="this is another machine than that of the record: write NAME-2.json, or "
        "the next number, and leave the others; pages show what all machines gave",
    )
    parser.add_argument(
        "--resume",
        action="store_true",
        help="keep the measurements of that record that have enough samples, run the "
        "others: for machines that are quiet only now and then",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the races that were asked for; 1 when one was refused."""
    if arguments.list:
        print("\n".join(list_lines()))
        return 0
    if arguments.name not in names():
        given = f"no races {arguments.name!r}" if arguments.name else "which races?"
        print(f"{given} There are: {', '.join(names())}", file=sys.stderr)
        return 2
    module = load(arguments.name)
    try:
        chosen = choose(module.RACES, arguments.race, arguments.ranks, arguments.sizes)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    settings = _settings(arguments)
    output = arguments.output
    whole = not (
        arguments.quick or arguments.race or arguments.ranks or arguments.sizes
    )
    if output is None and whole:
        folder = checkout() / "docs" / "data" / "bench"
        output = new_output(folder, arguments.name, arguments.another)
    words = [arguments.name, *(["--quick"] if arguments.quick else [])]
    made = record.Record(
        schema=record.SCHEMA,
        name=arguments.name,
        title=module.TITLE,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=shlex.join(["xtrain", "bench", *words]),
        machine=machine.describe(),
        versions=machine.versions(),
        settings=dataclasses.asdict(settings),
        measurements=[],
        facts=machine.facts() if output is not None else {},
    )
    try:
        done = finished(made, output) if arguments.resume else []
        for measurement in run_races(chosen, settings, done):
            made.measurements.append(measurement)
            if output is not None:
                record.write(made, partial(output))
    except RaceError as error:
        # The ranks' own words; the error of the World adds every rank's traceback.
        print(f"not timed: {error.__cause__ or error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if output is not None:
        partial(output).replace(output)
        print(f"written: {output}")
    return 0


def new_output(folder: Path, name: str, another: bool) -> Path:
    """NAME.json, or for another machine the first of NAME-2.json, ... not there."""
    output, number = folder / f"{name}.json", 2
    while another and output.is_file():
        output, number = folder / f"{name}-{number}.json", number + 1
    return output


def partial(output: Path) -> Path:
    """Where the measurements of an unfinished run lie, so that it can be resumed."""
    return output.with_name(output.name + ".partial")


def finished(made: record.Record, path: Path | None) -> list[record.Measurement]:
    """The measurements of a record, finished or not, in which nobody lacks samples.

    ValueError when there is no such record, or when it comes from another machine,
    other versions or other settings: such measurements do not belong to the new ones.
    """
    if path is not None and partial(path).is_file():
        path = partial(path)
    if path is None or not path.is_file():
        raise ValueError(f"nothing to resume: no record {path or '(see --output)'}")
    old = record.read(path)
    for what in ("name", "machine", "versions", "settings"):
        before, now = getattr(old, what), getattr(made, what)
        if before != now:
            raise ValueError(f"cannot resume {path}: its {what} is {before}, not {now}")
    wanted = made.settings["rounds"]
    return [h for h in old.measurements if min(r.kept for r in h.results) >= wanted]


def names() -> list[str]:
    """Every set of races there is."""
    return sorted(module.name for module in pkgutil.iter_modules(races.__path__))


def load(name: str) -> ModuleType:
    """The module with these races."""
    return importlib.import_module(f"{races.__name__}.{name}")


def list_lines() -> list[str]:
    """All races with their contestants and sizes."""
    lines = []
    for name in names():
        module = load(name)
        lines.append(f"{name}  {module.TITLE}")
        for race in module.RACES:
            sizes = ", ".join(report.bytes_text(size) for size in race.sizes)
            ranks = " and ".join(str(count) for count in race.ranks)
            others = ", ".join(c.name for c in race.contestants[1:])
            lines.append(f"  {race.name}: {race.title}; {sizes}; {ranks} ranks")
            lines.append(f"    {others}  against {race.contestants[0].name}")
    return lines


def choose(
    races: Sequence[Race],
    names: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Race]:
    """The races of these names, with other ranks or sizes where given.

    ValueError for a name that no race has.
    """
    unknown = set(names or ()) - {race.name for race in races}
    if unknown:
        raise ValueError(
            f"no race {', '.join(sorted(unknown))}; there are: "
            + ", ".join(race.name for race in races)
        )
    return [
        dataclasses.replace(
            race, ranks=tuple(ranks or race.ranks), sizes=tuple(sizes or race.sizes)
        )
        for race in races
        if not names or race.name in names
    ]


def run_races(
    chosen: Sequence[Race], settings: Settings, done: Sequence[record.Measurement] = ()
) -> Iterator[record.Measurement]:
    """Run every race at every size and world size, printing each when it is done.

    Measurements that are in `done` are not run again.
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
                        measurement = run_measurement(world, race, size, settings)
                        lines = report.measurement_lines(measurement)
                        print("\n".join(lines), end="\n\n", flush=True)
                    yield measurement


def checkout() -> Path:
    """The folder of this checkout; the current folder when installed elsewhere."""
    root = Path(__file__).resolve().parents[3]
    return root if (root / "docs" / "data").is_dir() else Path.cwd()


def _settings(arguments: argparse.Namespace) -> Settings:
    settings = QUICK if arguments.quick else Settings()
    if arguments.rounds is not None:
        settings = dataclasses.replace(
            settings, rounds=arguments.rounds, most_rounds=3 * arguments.rounds
        )
    if arguments.other_load_limit is not None:
        settings = dataclasses.replace(
            settings, other_load_limit=arguments.other_load_limit
        )
    return settings


def _counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _sizes(text: str) -> list[int]:
    return [parse_size(part) for part in text.split(",")]


def parse_size(text: str) -> int:
    """`16MiB` as 16777216. Units: B, KiB, MiB, GiB."""
    match = re.fullmatch(r"\s*(\d+)\s*([A-Za-z]*)\s*", text)
    unit = UNITS.get(match[2].lower()) if match else None
    if match is None or unit is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 16MiB")
    return int(match[1]) * unit
