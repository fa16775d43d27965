"""Races against torch, drawn from the recorded benchmarks."""

from .. import races
from ..amounts import bytes_
from ..runs import EvidenceError
from ..svg import Axis, bar_chart
from ..tables.races import names_in
from ..tables.training_races import steps_of
from . import REGISTRY

Bars = dict[str, dict[str, float]]


@REGISTRY
def lc1_race(race: str, ranks: int = 4, only: str = "", record: str = "lc1") -> str:
    """How many times as fast as the baseline each contestant is, by size.

    What it was on other machines is a stroke across the bar.

    Args:
        race: name of the race in `xtrain.bench.races`.
        only: contestants to show, separated by semicolons; all by default.
        record: another set of races.

    Raises:
        EvidenceError: the race has no contestant of that name.
    """
    bars: Bars = {}
    also: dict[tuple[str, str], list[float]] = {}
    found = races.measurements(record, race, ranks)
    for measurement in found:
        size = bytes_(measurement.size)
        ratios = {r.name: r.ratio for r in measurement.results[1:] if r.ratio}
        if ratios := chosen(ratios, only):
            bars[size] = ratios
        for name in ratios:
            others = races.ratios(record, measurement, name)[1:]
            also[size, name] = [ratio for ratio in others if ratio is not None]
    require(bars, only, f"{race}, {ranks} ranks")
    machine = races.record(record).machine
    where = f"{machine.get('cores', '')} cores, {races.race_date(record)[:10]}"
    if any(also.values()):
        where += "; strokes: other machines"
    title = f"{ranks} ranks on {found[0].backend}"
    return ratio_bars(bars, found[0].results[0].name, where, title, 400, also)


@REGISTRY
def training_race(
    record: str, prefix: str = "", ranks: int = 4, only: str = "", steps: str = ""
) -> str:
    """How many times as fast as the baseline the contestants are, step by step.

    Args:
        record: name of the record, such as lc2.
        prefix: how the races' names begin, such as fsdp_.
        only: contestants to show, separated by semicolons; all by default.
        steps: how the races' names end, likewise; SHAPES by default.
    """
    bars: Bars = {}
    for shape in steps_of(steps):
        for measurement in races.measurements(record, prefix + shape, ranks):
            baseline, *results = measurement.results
            ratios = {result.name: races.ratio(result) for result in results}
            bars[shape] = chosen(ratios, only)
    require(bars, only, record)
    where = f"{races.race_cores(record)} cores, {races.race_date(record)}"
    return ratio_bars(bars, baseline.name, where, f"{ranks} ranks", 420)


def chosen(ratios: dict[str, float], only: str) -> dict[str, float]:
    """Those of the contestants in `only`; all if it names none."""
    wanted = names_in(only) or list(ratios)
    return {name: ratio for name, ratio in ratios.items() if name in wanted}


def require(bars: Bars, only: str, where: str) -> None:
    """EvidenceError unless there are bars, and some of every contestant in `only`."""
    missing = set(names_in(only)) - {name for inner in bars.values() for name in inner}
    if missing or not bars:
        raise EvidenceError(f"{where}: no {missing or 'contestant'} in it")


def ratio_bars(
    bars: Bars,
    baseline: str,
    where: str,
    title: str,
    width: int,
    also: dict[tuple[str, str], list[float]] | None = None,
) -> str:
    """Ratios of medians in groups of bars, with a mark for the baseline.

    Args:
        where: the machine and the day, in words.
        title: of the drawing, for those who do not see it.
        also: ratios on other machines, by group and bar.
    """
    return bar_chart(
        bars,
        Axis(f"times as fast as {baseline}; {where}", format=lambda v: f"{v:.2f}x"),
        title,
        f"Ratios of medians against {baseline}; {where}.",
        reference=(1.0, baseline),
        width=width,
        also=also,
    )
