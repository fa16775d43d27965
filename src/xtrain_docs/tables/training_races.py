"""Tables of the races of whole training steps."""

from typing import TYPE_CHECKING

from .. import races
from ..amounts import bytes_, number
from . import REGISTRY, Table
from .races import names_in, results

if TYPE_CHECKING:
    from xtrain.bench.race_record import ContestantResult
    from xtrain.bench.training_trials import Shape

SHAPES = ("compute", "send", "small")
"""Ends of the races' names, and their order in tables, unless a page names others."""


@REGISTRY
def training_results(
    record: str, ranks: int, prefix: str = "", steps: str = ""
) -> Table:
    """All steps of one kind of race: time, ratio, spread and dropped samples.

    Args:
        prefix: how the races' names begin, such as fsdp_.
        steps: how they end, separated by semicolons; SHAPES by default.
    """
    found = (
        (shape, measurement)
        for shape in steps_of(steps)
        for measurement in races.measurements(record, prefix + shape, ranks)
    )
    return results("step", record, found)


def steps_of(steps: str) -> list[str]:
    """The names in `steps`, which semicolons separate; SHAPES without any."""
    return names_in(steps) or list(SHAPES)


@REGISTRY
def training_steps() -> Table:
    """The three steps that are raced: model and batch of each rank."""
    from xtrain.bench.training_trials import COMPUTE, SEND, SIZES, SMALL

    names = {COMPUTE: "compute", SEND: "send", SMALL: "small"}
    return steps_table([(names[shape], shape, size) for shape, size in SIZES.items()])


def steps_table(steps: "list[tuple[str, Shape, int]]") -> Table:
    """Names, shapes and sizes of steps, with the model that each makes."""
    from xtrain.bench.training_trials import config_for

    rows = []
    for name, shape, size in steps:
        config = config_for(size, shape.layers, shape.kv_heads)
        rows.append(
            [
                name,
                str(shape.layers),
                str(config.hidden_size),
                number(config.parameters),
                bytes_(4 * config.parameters),
                str(shape.batch),
                str(shape.sequence),
            ]
        )
    header = ["step", "layers", "width", "parameters", "weights", "batch", "tokens"]
    return Table(header, rows, "lrrrrrr")


@REGISTRY
def training_goals(record: str, prefix: str = "") -> Table:
    """Every goal, and what was measured at each number of ranks."""
    ranks = sorted(
        {measurement.ranks for measurement in races.record(record).measurements}
    )
    rows = []
    for shape in SHAPES:
        measurements = [
            measurement
            for count in ranks
            for measurement in races.measurements(record, prefix + shape, count)
        ]
        before = ""
        for result in measurements[0].results:
            if result.goal is None:
                continue
            step = "" if shape == before else shape
            row = [step, result.name, f"{result.goal:.2f}x"]
            row += [
                _against_goal(measurement.result(result.name))
                for measurement in measurements
            ]
            rows.append(row)
            before = shape
    header = ["step", "contestant", "goal", *(f"{count} ranks" for count in ranks)]
    return Table(header, rows, "llr" + "r" * len(ranks))


def _against_goal(result: "ContestantResult") -> str:
    """The ratio; with as many digits as it takes to see that a goal was missed."""
    ratio, goal = races.ratio(result), result.goal
    if goal is None or ratio >= goal:
        return f"{ratio:.2f}x"
    digits = 2
    while f"{ratio:.{digits}f}" == f"{goal:.{digits}f}":
        digits += 1
    return f"**{ratio:.{digits}f}x, missed**"


@REGISTRY
def training_memory(record: str, prefix: str = "", step: str = "send") -> Table:
    """Peak memory of the rank that takes most, in one of the steps."""
    measurements = [
        h for h in races.record(record).measurements if h.race == f"{prefix}{step}"
    ]
    names = [result.name for result in measurements[0].results]
    rows = []
    for name in names:
        row = [name]
        for measurement in measurements:
            peaks = [
                max(r.peak_bytes or [0])
                for r in (measurement.results[0], measurement.result(name))
            ]
            if not all(peaks):
                raise ValueError(f"{record}, {measurement.race}: no peak of {name}")
            row += [bytes_(peaks[1]), f"{peaks[1] / peaks[0]:.2f}"]
        rows.append(row)
    header = ["contestant"]
    for measurement in measurements:
        header += [f"{measurement.ranks} ranks", "of the baseline's"]
    return Table(header, rows, "l" + "rr" * len(measurements))
