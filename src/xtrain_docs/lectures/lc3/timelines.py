"""Timelines of lc3: what a recorded step of each stage does, and when."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ... import runs, values
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import document, fit, line, text

Event = list[Any]
WIDTH, LEFT, ROW, HEAD = 400, 60, 38, 16
LAYERS, MODEL_WIDTH, TOKENS = 4, 256, 128
# where in its row a bar lies, how high it is, its colour and how opaque it is
LANES = {
    "whole": (0, 36, 5, 0.2),
    "all-gather": (3, 6, 0, 1.0),
    "forward": (12, 14, 2, 0.4),
    "backward": (12, 14, 6, 0.4),
    "step": (12, 14, 3, 0.4),
    "reduce-scatter": (29, 6, 1, 1.0),
    "all-reduce": (0, 36, 7, 0.5),
}


@dataclass(frozen=True)
class Bar:
    """Something that takes time in a row; `words` is written into it."""

    row: int
    lane: str
    start: float
    stop: float
    words: str = ""


def spans(events: Sequence[Event], begin: str, *ends: str) -> list[Bar]:
    """From each `begin` to the first of the `ends` of the same number."""
    lane = {"unshard": "all-gather"}.get(begin, begin)
    words = {"forward": "F", "backward": "B", "step": "S"}.get(lane, "")
    under_way: dict[int, float] = {}
    found = []
    for what, number, at in events:
        if what == begin:
            under_way[number] = at
        elif what in ends and number in under_way:
            found.append(Bar(number, lane, under_way.pop(number), at, words))
    return found


def most_at_once(bars: Sequence[Bar]) -> int:
    """How many of the bars there are at the same time, at most."""
    return max(sum(b.start <= bar.start < b.stop for b in bars) for bar in bars)


def draw(
    bars: Sequence[Bar],
    rows: Sequence[str],
    phases: Sequence[tuple[str, float]],
    last: float,
    top: float,
) -> list[str]:
    """Rows of bars over time, from `top` on; `phases` have the time at which each ends.

    `last` is the time at the right edge.
    """

    def px(at: float) -> float:
        return LEFT + (WIDTH - LEFT - 6) * min(at / last, 1)

    parts, began = [], 0.0
    bottom = top + HEAD + ROW * len(rows)
    for name, ends in phases:
        middle = min(px((began + ends) / 2), WIDTH - 6 - 3.4 * len(name))
        parts.append(text(middle, top + 11, name, "xt-tick", "middle"))
        parts.append(line(px(ends), top + 2, px(ends), bottom, "xt-grid"))
        began = ends
    for row, name in enumerate(rows):
        y = top + HEAD + row * ROW
        parts.append(text(LEFT - 6, y + 23, name, "xt-tick", "end"))
    for bar in sorted(bars, key=lambda b: b.lane != "whole"):
        dy, height, colour, opacity = LANES[bar.lane]
        y, width = top + HEAD + bar.row * ROW + dy, px(bar.stop) - px(bar.start)
        hover = f"{bar.lane}, {rows[bar.row]}: {values.seconds(bar.start)} to " + (
            values.seconds(bar.stop)
        )
        parts.append(
            f'<rect x="{px(bar.start):.1f}" y="{y:g}" width="{max(width, 1.5):.1f}" '
            f'height="{height}" rx="2" class="xt-bar-fill xt-s{colour}" '
            f'fill-opacity="{opacity}"><title>{hover}</title></rect>'
        )
        if bar.words and width > 10:
            middle = px(bar.start) + width / 2
            parts.append(text(middle, y + 11.5, bar.words, "xt-label", "middle"))
    parts.append(line(LEFT, bottom + 2, WIDTH - 6, bottom + 2, "xt-axis"))
    return parts


def legend(names: dict[str, str], columns: Sequence[int] = (6, 196)) -> list[str]:
    """What the lanes are, each drawn as it lies in its row; `columns` begin at x."""
    parts = []
    for index, (lane, words) in enumerate(names.items()):
        x, y = columns[index % len(columns)], 2 + 20 * (index // len(columns))
        dy, height, colour, opacity = LANES[lane]
        high = max(5, 0.4 * height)
        parts.append(
            f'<rect x="{x}" y="{y + dy * 0.35:g}" width="20" height="{high:g}" '
            f'rx="1" class="xt-bar-fill xt-s{colour}" fill-opacity="{opacity}"/>'
        )
        parts.append(text(x + 27, y + 12, words, "xt-tick"))
    return parts


def finish(parts: list[str], bottom: float, last: float, title: str, words: str) -> str:
    """The drawing with the times at its ends."""
    parts.append(text(LEFT, bottom + 16, "0 ms", "xt-tick"))
    parts.append(text(WIDTH - 6, bottom + 16, values.seconds(last), "xt-tick", "end"))
    return fit(document(WIDTH, int(bottom + 22), parts, title, words), WIDTH)


# ------------------------------------------------------------------ stage 3


def check_fsdp(events: Sequence[Event], layers: int) -> None:
    """EvidenceError unless units are gathered, used and freed as the page says."""
    seen = [(what, number) for what, number, _ in events]

    def first(what: str, number: int, after: int = -1) -> int:
        try:
            return seen.index((what, number), after + 1)
        except ValueError:
            raise EvidenceError(f"unit {number}: no {what!r} after {after}") from None

    turn = [("forward", n, n + 1) for n in range(layers)]
    turn += [("backward", n, n - 1) for n in range(layers - 1, -1, -1)]
    freed = dict.fromkeys(range(layers), -1)
    for phase, unit, following in turn:
        steps = [freed[unit]]
        for what in ("unshard", "unshard waited", phase, f"{phase} ends", "reshard"):
            steps.append(first(what, unit, steps[-1]))
        if phase == "backward":
            first("reduce-scatter", unit, steps[4])
        if following in freed:
            gathered = first("unshard", following, freed[following])
            if not steps[2] < gathered < steps[3]:
                raise EvidenceError(f"{phase} {unit} began without a prefetch")
        freed[unit] = steps[-1]
    expected = {"unshard": 2 * layers, "reshard": 2 * layers, "reduce-scatter": layers}
    for what, times in expected.items():
        if (found := sum(w == what for w, _ in seen)) != times:
            raise EvidenceError(f"{found} times {what!r}, not {times}")
    whole = most_at_once(spans(events, "unshard", "reshard"))
    if whole > 2:
        raise EvidenceError(f"{whole} units are whole at once")


@REGISTRY
def fsdp_timeline(
    layers: int = LAYERS, width: int = MODEL_WIDTH, tokens: int = TOKENS
) -> str:
    """A step of stage 3 by rank 0's clock: a row for each unit."""
    from .runs_timeline import fsdp_step_by_the_clock

    return fsdp_chart(
        runs.remembered(fsdp_step_by_the_clock, 2, layers, width, tokens)[0], layers
    )


def fsdp_chart(events: Sequence[Event], layers: int) -> str:
    """Events of `fsdp_step_by_the_clock`."""
    check_fsdp(events, layers)
    last = events[-1][2]
    over = next(at for what, _, at in events if what == "backward over")
    turned = max(at for what, _, at in events if what == "forward ends")
    whole = spans(events, "unshard", "reshard")
    bars = [
        *(Bar(b.row, "whole", b.start, b.stop) for b in whole),
        *spans(events, "unshard", "unshard done", "unshard waited"),
        *spans(events, "forward", "forward ends"),
        *spans(events, "backward", "backward ends"),
        *spans(events, "reduce-scatter", "reduce-scatter done",
               "reduce-scatter waited"),
    ]  # fmt: skip
    names = [f"unit {n}" for n in range(layers)]
    phases = [("forward", turned), ("backward", over), ("step", last)]
    keys = {
        "all-gather": "all-gather",
        "whole": "from unshard to reshard",
        "forward": "F forward, B backward",
        "reduce-scatter": "reduce-scatter",
    }
    top = 42.0
    parts = [*legend(keys), *draw(bars, names, phases, last, top)]
    words = (
        f"Each of {layers} units is gathered before its forward and again before its "
        "backward, and freed after each. The next unit's all-gather is issued before "
        f"a unit computes; at most {most_at_once(whole)} units are whole at once. "
        "After its backward a unit's gradients are reduce-scattered."
    )
    bottom = top + HEAD + ROW * layers + 2
    return finish(parts, bottom, last, "A step of stage 3 over time", words)


# ------------------------------------------------------------- stages 1 and 2


def check_zero(events: Sequence[Event], stage: str, layers: int) -> None:
    """EvidenceError unless buckets are reduced, stepped and gathered in order."""
    seen = [(what, number) for what, number, _ in events]
    over, step, stepped = (
        seen.index((what, 0)) for what in ("backward over", "step", "step ends")
    )
    for bucket in range(layers):
        backward, reduced, waited, gathered = (
            seen.index((what, bucket))
            for what in ("backward ends", "reduce-scatter", "reduce-scatter waited",
                         "all-gather")
        )  # fmt: skip
        during = backward < reduced < over
        if during != (stage == "2"):
            raise EvidenceError(f"stage {stage} reduces bucket {bucket} at {reduced}")
        if not backward < reduced < waited < step < stepped < gathered:
            raise EvidenceError(f"stage {stage}: bucket {bucket} in another order")
    whole = most_at_once(whole_gradients(events))
    if whole != (layers if stage == "1" else 2):
        raise EvidenceError(f"stage {stage}: {whole} buckets of whole gradients")


def whole_gradients(events: Sequence[Event]) -> list[Bar]:
    """When each bucket has whole gradients: from its backward until it is reduced."""
    found = spans(events, "backward", "reduce-scatter waited")
    return [Bar(b.row, "whole", b.start, b.stop) for b in found]


@REGISTRY
def zero_timeline(
    layers: int = LAYERS, width: int = MODEL_WIDTH, tokens: int = TOKENS
) -> str:
    """A step of stage 1 and one of stage 2 by rank 0's clock: a row for each bucket."""
    from .runs_timeline import zero_step_by_the_clock

    return zero_chart(
        {
            stage: runs.remembered(
                zero_step_by_the_clock, 2, stage, layers, width, tokens
            )[0]
            for stage in ("1", "2")
        },
        layers,
    )


def zero_chart(events_of: dict[str, Sequence[Event]], layers: int) -> str:
    """Events of a step by stage, one above the other, over the same time."""
    last = max(events[-1][2] for events in events_of.values())
    keys = {
        "all-gather": "all-gather of weights",
        "whole": "whole gradients",
        "backward": "F, B and the step S",
        "reduce-scatter": "reduce-scatter",
    }
    parts, top, words = legend(keys), 44.0, []
    for stage, events in events_of.items():
        check_zero(events, stage, layers)
        (step,) = spans(events, "step", "step ends")
        bars = [
            *whole_gradients(events),
            *spans(events, "forward", "forward ends"),
            *spans(events, "backward", "backward ends"),
            *spans(events, "reduce-scatter", "reduce-scatter done",
                   "reduce-scatter waited"),
            *(Bar(row, "step", step.start, step.stop, "S") for row in range(layers)),
            *spans(events, "all-gather", "all-gather done", "all-gather waited"),
        ]  # fmt: skip
        over = next(at for what, _, at in events if what == "backward over")
        turned = max(at for what, _, at in events if what == "forward ends")
        end = next(at for what, _, at in events if what == "step over")
        phases = [("forward", turned), ("backward", over), ("step", end)]
        names = [f"bucket {n}" for n in range(layers)]
        parts.append(text(6, top + 11, f"stage {stage}", "xt-label"))
        parts += draw(bars, names, phases, last, top)
        top += HEAD + ROW * layers + 12
        most = most_at_once(whole_gradients(events))
        words.append(f"stage {stage} has {most} buckets of whole gradients at most")
    return finish(parts, top - 10, last, "A step of stages 1 and 2 over time",
                  "; ".join(words))  # fmt: skip


# ------------------------------------------------------- calls of every stage

STAGES = {
    "0": "data parallel", "1": "stage 1", "2": "stage 2", "3": "stage 3",
}  # fmt: skip
COLUMNS = {"forward": (94.0, 60), "backward": (160.0, 118), "step": (284.0, 116)}


@REGISTRY
def step_calls(ranks: int = 4) -> str:
    """The collectives of a step by stage and phase, as long as what they send."""
    from .runs import parameters_of_tower
    from .runs_timeline import calls_by_phase

    half = parameters_of_tower() * runs.ITEMSIZE * (ranks - 1) / ranks
    calls = {s: runs.remembered(calls_by_phase, ranks, s)[0] for s in STAGES}
    return calls_chart(calls, half)


def calls_chart(calls: dict[str, list[Event]], half: float) -> str:
    """[phase, name, bytes] of each call by stage; `half` is half an all-reduce."""
    unit, high = 57 / half, 34
    names = ("all-gather", "reduce-scatter", "all-reduce")
    parts = legend(dict(zip(names, names, strict=True)), (6, 124, 268))
    top = 44
    for phase, (x, width) in COLUMNS.items():
        parts.append(text(x, top - 6, phase, "xt-tick"))
        parts.append(line(x, top, x + width - 4, top, "xt-axis"))
    words = []
    for row, (stage, name) in enumerate(STAGES.items()):
        y = top + 8 + row * high
        parts.append(text(6, y + 15, name, "xt-label"))
        at = {phase: x for phase, (x, _) in COLUMNS.items()}
        for phase, call, sent in calls[stage]:
            dy = 12 if call == "reduce-scatter" else 0
            height = 22 if call == "all-reduce" else 10
            _, _, colour, opacity = LANES[call]
            parts.append(
                f'<rect x="{at[phase]:.1f}" y="{y + dy}" '
                f'width="{sent * unit - 1.2:.1f}" height="{height}" rx="1.5" '
                f'class="xt-bar-fill xt-s{colour}" fill-opacity="{opacity}">'
                f"<title>{name}, {phase}: {call}, {values.bytes_(sent)}</title></rect>"
            )
            at[phase] += sent * unit
        total = sum(sent for _, _, sent in calls[stage]) / half
        words.append(f"{name} sends {total:.2f} halves of an all-reduce")
    bottom = top + 8 + high * len(STAGES)
    drawing = document(WIDTH, bottom, parts, "Collectives of a step by stage",
                       "; ".join(words))  # fmt: skip
    return fit(drawing, WIDTH)
