"""The picture of every stage's collectives, as long as what they send."""

from ... import runs, values
from ...figures import REGISTRY
from ...svg import document, fit, line, rect, text
from .lanes import LANES, WIDTH, Event, legend

STAGES = {
    "0": "data parallel", "1": "stage 1", "2": "stage 2", "3": "stage 3",
}  # fmt: skip
COLUMNS = {"forward": (94.0, 60), "backward": (160.0, 118), "step": (284.0, 116)}


@REGISTRY
def step_calls(ranks: int = 4) -> str:
    """The collectives of a step by stage and phase, as long as what they send."""
    from .runs_phases import calls_by_phase
    from .runs_training import parameters_of_tower

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
            hover = f"{name}, {phase}: {call}, {values.bytes_(sent)}"
            parts.append(
                rect(at[phase], y + dy, sent * unit - 1.2, height, colour,
                     opacity=opacity, radius=1.5, hover=hover)
            )  # fmt: skip
            at[phase] += sent * unit
        total = sum(sent for _, _, sent in calls[stage]) / half
        words.append(f"{name} sends {total:.2f} halves of an all-reduce")
    bottom = top + 8 + high * len(STAGES)
    drawing = document(WIDTH, bottom, parts, "Collectives of a step by stage",
                       "; ".join(words))  # fmt: skip
    return fit(drawing, WIDTH)
