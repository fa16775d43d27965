"""Tables of the recorded races."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

from .. import races
from ..amounts import bytes_, number, percent, seconds, si
from . import REGISTRY, Table

if TYPE_CHECKING:
    from xtrain.bench.race_record import ContestantResult, Measurement, Record


@REGISTRY
def race_results(race: str, ranks: int, record: str = "lc1") -> Table:
    """One race at every size: time, ratio, spread and dropped samples."""
    found = races.measurements(record, race, ranks)
    return results("tensor", record, ((bytes_(m.size), m) for m in found))


def names_in(words: str) -> list[str]:
    """The names that semicolons separate."""
    return [name.strip() for name in words.split(";") if name.strip()]


def results(
    head: str, record: str, found: "Iterable[tuple[str, Measurement]]"
) -> Table:
    """A row for each contestant; the first column names its measurement once."""
    rows = [
        [name if place == 0 else "", *cells(result, measurement, record)]
        for name, measurement in found
        for place, result in enumerate(measurement.results)
    ]
    header = [head, *columns(record)]
    return Table(header, rows, "ll" + "r" * (len(header) - 2))


def columns(record: str) -> list[str]:
    """What `cells` holds of each contestant."""
    machines = len(races.records(record))
    others = [f"on machine {number}" for number in range(2, machines + 1)]
    return ["contestant", "time", "times as fast", "middle half of rounds", "dropped",
            *others]  # fmt: skip


def cells(
    result: "ContestantResult", measurement: "Measurement", record: str
) -> list[str]:
    baseline = result is measurement.results[0]
    time = "" if result.seconds is None else seconds(result.seconds)
    if baseline:
        speed, spread = "1", ""
    elif result.ratio is None:
        speed, spread = "not measured", ""
    else:
        speed = f"**{_times(result.ratio)}**"
        spread = _spread(result)
    dropped = f"{result.dropped} of {result.kept + result.dropped}"
    others = ["" if baseline else _elsewhere(r) for r in
              races.ratios(record, measurement, result.name)[1:]]  # fmt: skip
    return [result.name, time, speed, spread, dropped, *others]


def _elsewhere(ratio: float | None) -> str:
    return "not raced" if ratio is None else _times(ratio)


def _spread(result: "ContestantResult") -> str:
    low, high = result.ratio_low, result.ratio_high
    if low is None or high is None:
        return ""
    outside = races.outside(result)
    return f"{low:.2f} to {high:.2f}" + ", ratio outside" * outside


def _times(ratio: float) -> str:
    return f"{ratio:.2f}x"


@REGISTRY
def race_goals(record: str = "lc1", skip: str = "") -> Table:
    """Every goal beside what was measured, but those of the race `skip`."""
    rows = []
    for measurement in races.record(record).measurements:
        if measurement.race == skip:
            continue
        for result in measurement.results:
            if result.goal is None:
                continue
            found = races.ratios(record, measurement, result.name)
            measured = ", ".join("not measured" if r is None else _times(r)
                                 for r in found)  # fmt: skip
            verdict = _verdict([r for r in found if r is not None], result.goal)
            rows.append(
                [
                    f"{measurement.title}: {result.name}",
                    bytes_(measurement.size),
                    str(measurement.ranks),
                    _times(result.goal),
                    measured,
                    verdict,
                ]
            )
    header = ["race", "tensor", "ranks", "goal", "measured", ""]
    return Table(header, rows, "lrrrrl")


def _verdict(ratios: list[float], goal: float) -> str:
    """Of all machines together: a goal is met where every one meets it."""
    missed = sum(ratio < goal for ratio in ratios)
    if missed and missed < len(ratios):
        return f"**missed** on {missed} of {len(ratios)} machines"
    return "**missed**" if missed else "met" * bool(ratios)


@REGISTRY
def race_lost(record: str = "lc1", skip: str = "") -> Table:
    """Every measurement that the baseline won, but in the race `skip`."""
    rows = [
        [
            measurement.title,
            bytes_(measurement.size),
            str(measurement.ranks),
            result.name,
            _times(result.ratio),
            _spread(result),
        ]
        for measurement in races.record(record).measurements
        for result in measurement.results
        if measurement.race != skip and result.ratio is not None and result.ratio < 1
    ]
    header = ["race", "tensor", "ranks", "contestant", "times as fast",
              "middle half of rounds"]  # fmt: skip
    nothing = [["nothing", *"–––––"]]
    return Table(header, rows or nothing, "lrrlrr")


@REGISTRY
def race_bytes(race: str, size: int, ranks: int = 4, record: str = "lc1") -> Table:
    """What the busiest rank sends in one call: formula, ledger, sockets."""
    measurement = races.record(record).measurement(race, size, ranks)
    rows = [
        [
            result.name,
            _busiest(result.bytes_formula, "known to the backend only"),
            _busiest(result.bytes_sent, "no messages of ours"),
            _busiest(result.wire_bytes, "not counted"),
        ]
        for result in measurement.results
    ]
    header = ["contestant", "formula", "ledger", "through the sockets"]
    return Table(header, rows, "lrrr")


def _busiest(counts: list[int] | None, otherwise: str) -> str:
    return otherwise if counts is None else number(max(counts))


@REGISTRY
def race_machine(record: str = "lc1") -> Table:
    """Where and how the records were made, a column for each machine."""
    columns = [_about(found) for found in races.records(record)]
    rows = [[name, *(column.get(name, "not recorded") for column in columns)]
            for name in columns[0]]  # fmt: skip
    numbers = [f"machine {number + 1}" for number in range(len(columns))]
    header = ["", *(numbers if len(columns) > 1 else [""])]
    return Table(header, rows, "l" * len(header))


def _about(found: "Record") -> dict[str, str]:
    machine, settings, facts = found.machine, found.settings, found.facts
    memory = machine.get("memory_bytes")
    results = [
        result for measurement in found.measurements for result in measurement.results
    ]
    taken = sum(result.kept + result.dropped for result in results)
    about = {
        "command": f"`{found.command}`",
        "date": found.date,
        "machine": f"{machine['cores']} cores, {machine['cpu']}",
        "memory": bytes_(memory) if memory else "unknown",
        "system": f"{machine['system']}, TCP {machine.get('tcp') or 'unknown'}",
        "waking a process, there and back": "not recorded",
        "one core copies": "not recorded",
        "versions": ", ".join(f"{k} {v}" for k, v in found.versions.items()),
        "samples wanted": f"{settings['rounds']} of each contestant",
        "one sample": f"at least {seconds(settings['sample_seconds'])}",
        "dropped above": f"{percent(settings['other_load_limit'])} other load",
        "dropped": f"{sum(result.dropped for result in results)} of {taken}",
    }
    if facts:
        about["waking a process, there and back"] = seconds(facts["wake_seconds"])
        about["one core copies"] = si(facts["copy_bytes_per_second"], "B/s")
    other_load = [h.other_load for h in found.measurements if h.other_load is not None]
    if other_load:
        words = f"up to {percent(max(other_load), 1)} (median of a measurement)"
        about["other load in kept samples"] = words
    return about
