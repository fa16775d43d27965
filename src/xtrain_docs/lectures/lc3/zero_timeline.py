"""The timelines of stages 1 and 2: when a bucket is reduced, stepped and gathered."""

from collections.abc import Sequence

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import text
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
    "all-gather": "all-gather of weights",
    "whole": "whole gradients",
    "backward": "F, B and the step S",
    "reduce-scatter": "reduce-scatter",
}


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
    parts, top, words = legend(KEYS), 44.0, []
    for stage, events in events_of.items():
        check_zero(events, stage, layers)
        turned, over = turning(events)
        end = next(at for what, _, at in events if what == "step over")
        phases = [("forward", turned), ("backward", over), ("step", end)]
        names = [f"bucket {n}" for n in range(layers)]
        parts.append(text(6, top + 11, f"stage {stage}", "xt-label"))
        parts += draw(bars_of(events, layers), names, phases, last, top)
        top += HEAD + ROW * layers + 12
        most = most_at_once(whole_gradients(events))
        words.append(f"stage {stage} has {most} buckets of whole gradients at most")
    return finish(parts, top - 10, last, "A step of stages 1 and 2 over time",
                  "; ".join(words))  # fmt: skip


def bars_of(events: Sequence[Event], layers: int) -> list[Bar]:
    """What is drawn of a step; the optimizer's is in every row."""
    (step,) = spans(events, "step", "step ends")
    return [
        *whole_gradients(events),
        *spans(events, "forward", "forward ends"),
        *spans(events, "backward", "backward ends"),
        *reductions(events),
        *(Bar(row, "step", step.start, step.stop, "S") for row in range(layers)),
        *spans(events, "all-gather", "all-gather done", "all-gather waited"),
    ]
