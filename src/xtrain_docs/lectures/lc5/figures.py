"""Figures of the lc5 pages: timelines of schedules, as the simulator plays them."""

from xtrain.schedules import SCHEDULES, Timeline, render_svg, simulate, validate

from ...figures import REGISTRY
from ...svg import Axis, fit, line_chart

STAGE_PIXELS = 27.0
"""How long F of a whole rank's part is drawn where schedules are compared."""
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


def played(
    name: str,
    ranks: int,
    micro_batches: int,
    chunks: int | None = None,
    **times: float,
) -> Timeline:
    """A checked schedule with its times."""
    options = {} if chunks is None else {"chunks": chunks}
    schedule = SCHEDULES[name](ranks, micro_batches, **options)
    validate(schedule)
    return simulate(schedule, **times)


@REGISTRY
def schedule_timeline(
    name: str,
    ranks: int = 4,
    micro_batches: int = 8,
    chunks: int | None = None,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    p2p: float = 0.0,
) -> str:
    """One schedule, one row a rank."""
    timeline = played(
        name, ranks, micro_batches, chunks,
        forward=forward, backward_input=backward_input,
        backward_weight=backward_weight, p2p=p2p,
    )  # fmt: skip
    return render_svg(timeline)


def same_model(name: str, ranks: int, micro_batches: int) -> Timeline:
    """Played with F = B = W = 1 of a rank's whole part of the model.

    With several chunks a rank a virtual stage is so much shorter.
    """
    chunks = SCHEDULES[name](ranks, micro_batches).chunks
    part = 1.0 / chunks
    return played(
        name, ranks, micro_batches,
        forward=part, backward_input=part, backward_weight=part,
    )  # fmt: skip


@REGISTRY
def schedules_at_one_scale(ranks: int = 4, micro_batches: int = 8) -> str:
    """All schedules of one model and one batch, one above the other."""
    parts = []
    for name, title in TITLES.items():
        timeline = same_model(name, ranks, micro_batches)
        words = f"{title}: {timeline.makespan:g}"
        drawing = render_svg(timeline, words, scale=STAGE_PIXELS)
        parts.append(f'<p style="{HEADING}">{words}</p>{drawing}')
    return "".join(parts)


@REGISTRY
def bubble_by_micro_batches(ranks: int = 8, most: int = 128) -> str:
    """Idle share of the step over the number of micro-batches, by schedule."""
    counts = [m for m in (8, 16, 32, 64, 128, 256) if m <= most]
    series = {}
    for name, options in (
        ("one_f_one_b", {}), ("interleaved", {"chunks": 2}), ("zb_h1", {}),
        ("zb_h2", {}), ("dualpipe", {}),
    ):  # fmt: skip
        legal = [m for m in counts if name != "dualpipe" or m >= 2 * ranks]
        series[TITLES[name].partition(",")[0]] = [
            (m, 100 * played(name, ranks, m, **options).idle_fraction) for m in legal
        ]
    drawing = line_chart(
        series,
        Axis("micro-batches", "log2", ticks=counts, format=lambda m: f"{m:.0f}"),
        Axis("idle", format=lambda share: f"{share:.0f} %", low=0),
        title=f"Idle share of the longest waiting of {ranks} ranks",
    )
    return fit(drawing, 560)
