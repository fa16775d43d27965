"""The timeline of stage 3: when each unit is gathered, used and freed."""

from collections.abc import Sequence

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from .lanes import (
    HEAD,
    LAYERS,
    MODEL_WIDTH,
    ROW,
    TOKENS,
    Bar,
    Event,
    draw,
    finish,
    legend,
    most_at_once,
    reductions,
    spans,
    turning,
)

KEYS = {
    "all-gather": "all-gather",
    "whole": "from unshard to reshard",
    "forward": "F forward, B backward",
    "reduce-scatter": "reduce-scatter",
}


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
    turned, over = turning(events)
    whole = spans(events, "unshard", "reshard")
    bars = [
        *(Bar(b.row, "whole", b.start, b.stop) for b in whole),
        *spans(events, "unshard", "unshard done", "unshard waited"),
        *spans(events, "forward", "forward ends"),
        *spans(events, "backward", "backward ends"),
        *reductions(events),
    ]
    names = [f"unit {n}" for n in range(layers)]
    phases = [("forward", turned), ("backward", over), ("step", last)]
    top = 42.0
    parts = [*legend(KEYS), *draw(bars, names, phases, last, top)]
    words = (
        f"Each of {layers} units is gathered before its forward and again before its "
        "backward, and freed after each. The next unit's all-gather is issued before "
        f"a unit computes; at most {most_at_once(whole)} units are whole at once. "
        "After its backward a unit's gradients are reduce-scattered."
    )
    bottom = top + HEAD + ROW * layers + 2
    return finish(parts, bottom, last, "A step of stage 3 over time", words)
