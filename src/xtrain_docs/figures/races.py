"""Races against torch, drawn from the recorded benchmarks; empty until there is one."""

from .. import races, values
from ..runs import EvidenceError
from ..svg import Axis, bar_chart, document, fit, text
from . import REGISTRY


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
    if not (races.RECORDS / f"{record}.json").is_file():
        return no_record(race, ranks)
    found = races.record(record)
    wanted = [name.strip() for name in only.split(";") if name.strip()]
    bars: dict[str, dict[str, float]] = {}
    also: dict[tuple[str, str], list[float]] = {}
    baseline = ""
    for measurement in found.measurements:
        if measurement.race != race or measurement.ranks != ranks:
            continue
        baseline = measurement.results[0].name
        ratios = {
            result.name: result.ratio
            for result in measurement.results[1:]
            if result.ratio is not None and (not wanted or result.name in wanted)
        }
        size = values.bytes_(measurement.size)
        if ratios:
            bars[size] = ratios
        for name in ratios:
            others = races.ratios(record, measurement, name)[1:]
            also[size, name] = [ratio for ratio in others if ratio is not None]
    drawn = {name for inner in bars.values() for name in inner}
    if baseline and not drawn >= set(wanted):
        raise EvidenceError(f"{race}, {ranks} ranks: no {set(wanted) - drawn} in it")
    if not bars:
        return no_record(race, ranks)
    where = f"{found.machine.get('cores', '')} cores, {found.date[:10]}"
    if any(also.values()):
        where += "; strokes: other machines"
    title = f"{ranks} ranks on {found.measurements[0].backend}"
    return ratio_bars(bars, baseline, where, title, 400, also)


def ratio_bars(
    bars: dict[str, dict[str, float]],
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
    drawing = bar_chart(
        bars,
        Axis(f"times as fast as {baseline}; {where}", format=lambda v: f"{v:.2f}x"),
        title,
        f"Ratios of medians against {baseline}; {where}.",
        reference=(1.0, baseline),
        width=width,
        also=also,
    )
    return fit(drawing, width)


def no_record(race: str, ranks: int) -> str:
    """The picture that stands where a race has not been recorded yet."""
    lines = [
        text(16, 34, f"No recorded race yet: {race}, {ranks} ranks.", "xt-label"),
        text(16, 58, "xtrain bench lc1 writes one.", "xt-tick"),
    ]
    words = f"{race}, {ranks} ranks"
    return fit(document(400, 80, lines, "No recorded race yet", words), 400)
