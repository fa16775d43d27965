"""What every schedule asks of its sizes, and a simulation of its times."""

from collections.abc import Sequence
from math import isfinite

from xtrain.schedules.action import Schedule

Times = float | Sequence[float]
"""Of every virtual stage the same, or one a stage, in the order of the model."""


def check_sizes(name: str, ranks: int, micro_batches: int, chunks: int = 1) -> None:
    """Raise ValueError unless all are whole numbers of at least 1."""
    sizes = {"ranks": ranks, "micro_batches": micro_batches, "chunks": chunks}
    for what, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"{name}: {what}={size!r}, but it is a whole number of at least 1"
            )


def check_even_ranks(name: str, ranks: int) -> None:
    """The model is mirrored at the middle, so there is a middle."""
    if ranks % 2:
        near = f"{ranks - 1} or {ranks + 1}" if ranks > 1 else "2"
        raise ValueError(
            f"{name}: ranks={ranks}, but the mirrored halves of the pipeline need an "
            f"even number of ranks; take {near}"
        )


def check_multiple(name: str, micro_batches: int, of: int, why: str) -> None:
    """`micro_batches` is a multiple of `of`."""
    if micro_batches % of:
        below = micro_batches // of * of
        near = f"{below} or {below + of}" if below else f"{of}"
        raise ValueError(
            f"{name}: micro_batches={micro_batches}, but {why}, so it is a multiple of "
            f"{of}; take {near}"
        )


def check_least(name: str, micro_batches: int, least: int, why: str) -> None:
    """`micro_batches` is at least `least`."""
    if micro_batches < least:
        raise ValueError(
            f"{name}: micro_batches={micro_batches}, but {why}; take {least} or more"
        )


def stage_times(schedule: Schedule, name: str, times: Times) -> list[float]:
    """The time of every virtual stage; ValueError if there are more or fewer times."""
    if isinstance(times, int | float):
        check_time(name, times)
        return [times] * schedule.stages
    if len(times) != schedule.stages:
        raise ValueError(
            f"simulate: {len(times)} times of {name}, but {schedule.name} has "
            f"{schedule.stages} virtual stages: give one number, or one a stage"
        )
    for stage, time in enumerate(times):
        check_time(f"{name} of stage {stage}", time)
    return list(times)


def check_time(name: str, time: float) -> None:
    """Raise ValueError unless it is finite and at least 0."""
    if not (isfinite(time) and time >= 0):
        raise ValueError(
            f"simulate: the time of {name} is {time}, but it is finite and never < 0"
        )
