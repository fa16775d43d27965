"""Races against torch, drawn from the recorded benchmark; empty until there is one."""

from pathlib import Path

from .. import config, values
from ..svg import Axis, bar_chart, document, fit, text
from . import REGISTRY

RECORD = config.ROOT / "docs" / "data" / "bench" / "lc1.json"


@REGISTRY
def lc1_race(race: str, ranks: int = 4, only: str = "", path: str = "") -> str:
    """How many times as fast as the baseline each contestant is, by size.

    Args:
        race: name of the race in `xtrain.bench.races.lc1`.
        only: contestants to show, separated by commas; all by default.
        path: another record than docs/data/bench/lc1.json.
    """
    record = Path(path) if path else RECORD
    if not record.is_file():
        return no_record(race, ranks)
    from xtrain.bench.record import read

    found = read(record)
    wanted = [name.strip() for name in only.split(",") if name.strip()]
    bars: dict[str, dict[str, float]] = {}
    baseline = ""
    for heat in found.heats:
        if heat.race != race or heat.ranks != ranks:
            continue
        baseline = heat.results[0].name
        ratios = {
            result.name: result.ratio
            for result in heat.results[1:]
            if result.ratio is not None and (not wanted or result.name in wanted)
        }
        if ratios:
            bars[values.bytes_(heat.size)] = ratios
    if not bars:
        return no_record(race, ranks)
    where = f"{found.machine.get('cores', '')} cores, {found.date[:10]}"
    title = f"{ranks} ranks on {found.heats[0].backend}"
    return ratio_bars(bars, baseline, where, title, 500)


def ratio_bars(
    bars: dict[str, dict[str, float]], baseline: str, where: str, title: str, width: int
) -> str:
    """Ratios of medians in groups of bars, with a mark for the baseline.

    Args:
        where: the machine and the day, in words.
        title: of the drawing, for who does not see it.
    """
    drawing = bar_chart(
        bars,
        Axis(f"times as fast as {baseline}; {where}", format=lambda v: f"{v:.2f}x"),
        title,
        f"Ratios of medians against {baseline}; {where}.",
        reference=(1.0, baseline),
        width=width,
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
