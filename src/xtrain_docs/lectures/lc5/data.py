"""What the page on pipeline and data ranks shows: when stages reduce, what is sent."""

from collections.abc import Sequence

from xtrain.schedules import (
    SCHEDULES,
    Action,
    Schedule,
    Timeline,
    parse_action,
    render_svg,
    simulate,
)

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table

DATA = 2  # data ranks of each stage
WRAPPERS = {
    "ddp": "DDP",
    "zero 1": "ZeRO-1",
    "zero 2": "ZeRO-2",
    "fsdp": "FSDP, weights freed after forward",
    "fsdp kept": "FSDP, weights kept",
}
VIOLET = "fill:#6b4fa0"
SLOT = 58.0  # where rows begin in a drawing of `render_svg`


@FIGURES
def when_stages_reduce(name: str, ranks: int = 4, micro_batches: int = 6) -> str:
    """What ranks did, drawn with F = B = W = 1 and a reduction as long as two."""
    from .runs_data import executed

    orders = runs.remembered(executed, ranks * DATA, name, micro_batches)
    every = [[parse_action(text) for text in order] for order in orders]
    if any(every[r] != every[r - r % DATA] for r in range(len(every))):
        raise EvidenceError(f"{name}: data ranks of a stage did different things")
    return drawing(name, micro_batches, every[::DATA], reduction=2.0)


def drawing(
    name: str, micro_batches: int, orders: Sequence[list[Action]], reduction: float
) -> str:
    """The timeline of what was computed, with REDUCE after a rank's last action."""
    schedule = SCHEDULES[name](len(orders), micro_batches)
    timeline = simulate(as_executed(schedule, orders))
    ends = [row[-1] for row in timeline.ends]
    scale = 27.0
    longest = max(end + reduction for end in ends)
    svg = render_svg(timeline, f"{name}, with the reductions of gradients", scale)
    width = SLOT + longest * scale + 12
    cells = "".join(
        f'<rect x="{SLOT + end * scale:.1f}" y="{8 + rank * 32}" '
        f'width="{reduction * scale:.1f}" height="26" style="{VIOLET}">'
        f"<title>{orders[rank][-1]}</title></rect>"
        f'<text class="n" x="{SLOT + (end + reduction / 2) * scale:.1f}" '
        f'y="{8 + rank * 32 + 17}">sum</text>'
        for rank, end in enumerate(ends)
    )
    before = timeline_width(timeline, scale)
    for was, now in (
        (f'viewBox="0 0 {before:.0f}', f'viewBox="0 0 {width:.0f}'),
        (f'width="{before:.0f}"', f'width="{width:.0f}"'),
    ):
        if was not in svg:
            raise EvidenceError(f"no {was} in the drawing of {name}")
        svg = svg.replace(was, now, 1)
    return svg.replace("</svg>", cells + "</svg>")


def timeline_width(timeline: Timeline, scale: float) -> float:
    return SLOT + timeline.makespan * scale + 12


def as_executed(schedule: Schedule, orders: Sequence[list[Action]]) -> Schedule:
    """The schedule with what ranks computed; EvidenceError unless REDUCE came last."""
    computed = []
    for rank, order in enumerate(orders):
        *actions, last = order
        if last.kind != "REDUCE" or any(a.kind == "REDUCE" for a in actions):
            raise EvidenceError(f"rank {rank} does not end with its reduction: {order}")
        computed.append(actions)
    if tuple(computed) != tuple(map(list, schedule.actions)):
        raise EvidenceError(f"{schedule.name}: ranks did not do what the schedule says")
    return schedule


def formula(wrapper: str, weights: int, root: int, micro_batches: int) -> list[float]:
    """Bytes a rank sends over its data ranks: in `runner.step`, in the update."""
    part = (DATA - 1) / DATA
    layers = weights - root
    match wrapper:
        case "ddp":
            return [2 * part * weights, 0.0]
        case "zero 1" | "zero 2":
            return [part * weights, part * weights]
        case "fsdp":
            return [part * (root + 2 * micro_batches * layers + weights), 0.0]
        case "fsdp kept":
            return [part * 2 * weights, 0.0]
    raise ValueError(f"no wrapper {wrapper!r}")


def measured(wrapper: str, micro_batches: int) -> dict[str, int]:
    """Of rank 0's stage, the mean of its data ranks, held against the formula."""
    from .runs_data import sent

    found = runs.remembered(sent, 2 * DATA, wrapper, micro_batches)
    sums = {key: sum(f[key] for f in found[:DATA]) / DATA for key in found[0]}
    expected = formula(wrapper, found[0]["weights"], found[0]["root"], micro_batches)
    for key, right in zip(("step", "update"), expected, strict=True):
        if not 0 <= sums[key] - right <= 0.01 * found[0]["weights"]:  # padding
            raise EvidenceError(f"{wrapper}: {key} sends {sums[key]}, not {right}")
    return {key: round(value) for key, value in sums.items()}


@TABLES
def sent_over_data(few: int = 4, many: int = 8) -> Table:
    """Bytes over data ranks as multiples of the stage's weights, by wrapper."""
    rows = []
    for wrapper, title in WRAPPERS.items():
        one, other = (measured(wrapper, m) for m in (few, many))
        rows.append(
            [
                title,
                f"{one['step'] / one['weights']:.2f}",
                f"{other['step'] / other['weights']:.2f}",
                f"{one['update'] / one['weights']:.2f}",
            ]
        )
    header = ["", f"`step`, {few} micro-batches", f"`step`, {many} micro-batches"]
    return Table([*header, "`optimizer.step`"], rows, "lrrr")
