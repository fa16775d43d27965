"""What several pages of lecture 5 share: schedules as the simulator plays them."""

from functools import cache

from xtrain.schedules import (
    SCHEDULES,
    Schedule,
    Timeline,
    render_svg,
    simulate,
    validate,
    with_messages,
)

from ...figures import REGISTRY
from ...values import VALUES, value

HEADING = "position:sticky;left:0;margin:0;color:var(--xt-ink)"
TITLES = {
    "gpipe": "GPipe",
    "one_f_one_b": "1F1B",
    "interleaved": "Interleaved 1F1B, 2 chunks a rank",
    "zb_h1": "ZB-H1",
    "zb_h2": "ZB-H2",
    "zb_v": "ZB-V",
    "chimera": "Chimera",
    "dualpipe_simple": "DualPipe without W split off",
    "dualpipe": "DualPipe",
    "dualpipe_v": "DualPipeV",
}
VALUES["SCHEDULE_TITLES"] = TITLES


@cache
def made(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> Schedule:
    """A checked schedule."""
    options = {} if chunks is None else {"chunks": chunks}
    schedule = SCHEDULES[name](ranks, micro_batches, **options)
    validate(schedule)
    return schedule


@value
def played(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    **times: float,
) -> Timeline:
    """A checked schedule with its times."""
    return simulate(made(name, ranks, micro_batches, chunks), **times)


@value
def step_of(name: str, ranks: int, micro_batches: int, exchange: float = 0.0) -> float:
    """The length of one step as played, F = B = W = 1."""
    return played(name, ranks, micro_batches, all_to_all=exchange).makespan


@value
def idle_of(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> float:
    """The longest idle time, F = B = W = 1 of a rank's whole part."""
    timeline = played(name, ranks, micro_batches, chunks)
    return max(timeline.idle) / timeline.schedule.chunks


@value
def held_by(
    name: str,
    ranks: int,
    micro_batches: int,
    rank: int,
    until: str = "B",
    chunks: int | None = None,
) -> float:
    """Micro-batches that a rank holds at most, from their forward to B or to W."""
    timeline = played(name, ranks, micro_batches, chunks)
    peaks = {"B": timeline.peak_activations, "W": timeline.peak_until_weights}
    return peaks[until][rank]


@value
def messages_of(
    name: str, ranks: int, micro_batches: int, chunks: int | None = None
) -> float:
    """Of one micro-batch, forward and backward, counted in the lists of messages."""
    order = with_messages(made(name, ranks, micro_batches, chunks))
    sent = sum(a.kind.startswith("SEND") for row in order.actions for a in row)
    return sent / micro_batches


@REGISTRY
def schedule_timeline(
    name: str,
    ranks: int = 4,
    micro_batches: int = 8,
    chunks: int | None = None,
    **times: float,
) -> str:
    """One schedule, one row a rank."""
    return render_svg(played(name, ranks, micro_batches, chunks, **times))
