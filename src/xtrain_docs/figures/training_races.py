"""The races of whole training steps as a drawing."""

from .. import races
from ..tables.training_races import steps_of
from . import REGISTRY
from .races import ratio_bars


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
    wanted = [name.strip() for name in only.split(";") if name.strip()]
    bars: dict[str, dict[str, float]] = {}
    baseline = ""
    for shape in steps_of(steps):
        for measurement in races.measurements(record, prefix + shape, ranks):
            baseline = measurement.results[0].name
            bars[shape] = {
                result.name: races.ratio(result)
                for result in measurement.results[1:]
                if not wanted or result.name in wanted
            }
    unknown = set(wanted) - {name for inner in bars.values() for name in inner}
    if unknown:
        raise ValueError(f"{record}: nobody is called {sorted(unknown)}")
    cores, date = races.race_cores(record), races.race_date(record)
    return ratio_bars(bars, baseline, f"{cores} cores, {date}", f"{ranks} ranks", 420)
