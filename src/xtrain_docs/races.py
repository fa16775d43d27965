"""The recorded races, for tables, figures and numbers on pages.

    docs/data/bench/lc1.json      the machine that pages describe
    docs/data/bench/lc1-2.json    another one: its ratios stand beside the first's

A record is read once for each build; a page that names what is not in
it stops the build.
"""

from functools import cache
from typing import TYPE_CHECKING

from . import config

if TYPE_CHECKING:
    from xtrain.bench.race_record import ContestantResult, Measurement, Record

RECORDS = config.ROOT / "docs" / "data" / "bench"


def record(name: str) -> "Record":
    """The record docs/data/bench/NAME.json."""
    return records(name)[0]


@cache
def records(name: str) -> "list[Record]":
    """The records of all machines, NAME.json first."""
    from xtrain.bench.race_record import read

    path = RECORDS / f"{name}.json"
    if not path.is_file():
        raise ValueError(f"no record {path.name}: `xtrain bench {name}` writes it")
    others = sorted(RECORDS.glob(f"{name}-*.json"), key=lambda p: (len(p.name), p.name))
    return [read(each) for each in (path, *others)]


class Ratio(float):
    """A ratio of the first machine, with those of all: `low` to `high`."""

    low: float
    high: float


def ratios(
    name: str, measurement: "Measurement", contestant: str
) -> list[float | None]:
    """The ratio of a contestant on every machine, None where it was not measured."""
    found: list[float | None] = []
    for each in records(name):
        try:
            there = each.measurement(
                measurement.race, measurement.size, measurement.ranks
            ).result(contestant)
        except ValueError:
            found.append(None)
        else:
            found.append(there.ratio)
    return found


def measurements(name: str, race: str, ranks: int) -> "list[Measurement]":
    """All sizes of one race; ValueError when there are none."""
    found = [h for h in record(name).measurements if (h.race, h.ranks) == (race, ranks)]
    if not found:
        raise ValueError(f"{name}: no measurements of {race!r} on {ranks} ranks")
    return found


def ratio(result: "ContestantResult") -> float:
    """Times as fast as the baseline; ValueError when it was not measured."""
    if result.ratio is None:
        raise ValueError(f"{result.name}: not measured, all samples were dropped")
    return result.ratio


# ------------------------------------------------------------ numbers on pages


def race_ratio(
    name: str, race: str, contestant: str, size: int, ranks: int = 4
) -> float:
    """How many times as fast as the baseline, as recorded, on all machines."""
    measurement = record(name).measurement(race, size, ranks)
    found = Ratio(ratio(measurement.result(contestant)))
    measured = [r for r in ratios(name, measurement, contestant) if r is not None]
    found.low, found.high = min(measured), max(measured)
    return found


def race_seconds(
    name: str, race: str, contestant: str, size: int, ranks: int = 4
) -> float:
    """Median seconds of one call, as recorded."""
    result = record(name).measurement(race, size, ranks).result(contestant)
    if result.seconds is None:
        raise ValueError(f"{contestant}: not measured, all samples were dropped")
    return result.seconds


def race_wire(name: str, race: str, contestant: str, size: int, ranks: int = 4) -> int:
    """Bytes that the busiest rank's sockets sent in one call, as recorded."""
    result = record(name).measurement(race, size, ranks).result(contestant)
    if result.wire_bytes is None:
        raise ValueError(f"{contestant}: wire bytes were not counted")
    return max(result.wire_bytes)


def race_cores(name: str) -> int:
    """Cores of the machine of the record."""
    return record(name).machine["cores"]


def race_date(name: str) -> str:
    """The day of the record, as 2026-11-21."""
    return record(name).date


def race_length(name: str) -> str:
    """Whether the record is of a full run, in words."""
    if "--quick" in record(name).command:
        return "a short look on a busy machine"
    return "a full run"


def outside(result: "ContestantResult") -> bool:
    """Whether the ratio of medians lies outside the middle half of its own rounds."""
    low, ratio, high = result.ratio_low, result.ratio, result.ratio_high
    if low is None or ratio is None or high is None:
        return False
    return not low <= ratio <= high


def race_outside(name: str, count: bool = True) -> int:
    """Ratios outside their own middle half; or all of them, with count=False."""
    results = [r for m in record(name).measurements for r in m.results]
    compared = [r for r in results if r.ratio is not None]
    return sum(map(outside, compared)) if count else len(compared)


VALUES = (
    race_outside,
    race_ratio,
    race_seconds,
    race_wire,
    race_cores,
    race_date,
    race_length,
)
