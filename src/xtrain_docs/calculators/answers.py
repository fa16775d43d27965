"""What the calculators answer: HTML computed by `xtrain.plan` and `xtrain.schedules`.

Standard library only: the browser's Python runs this file.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from xtrain.schedules import SCHEDULES, render_svg, simulate, validate

from .forms import Choice, Field, Number, read_values
from .markup import html_table
from .planning import (
    BEST_FIELDS,
    LABELS,
    LAYOUT_FIELDS,
    MEMORY_FIELDS,
    best,
    layouts,
    memory,
)


@dataclass(frozen=True)
class Calculator:
    """A form and the function that answers it.

    Attributes:
        answer: gets the fields' values by name and returns HTML; ValueError says to the
            reader what does not fit.
    """

    title: str
    fields: Sequence[Field]
    answer: Callable[..., str]


def answer(name: str, given: Mapping[str, object]) -> str:
    """The answer of the calculator `name` to what was entered, as HTML."""
    if name not in CALCULATORS:
        raise ValueError(f"no calculator {name!r}; there are: {', '.join(CALCULATORS)}")
    calculator = CALCULATORS[name]
    values = read_values(calculator.fields, given)
    try:
        return calculator.answer(**values)
    except ValueError as problem:
        raise ValueError(in_labels(str(problem), calculator.fields)) from None


NAMED = re.compile(r"\b([a-z_]+)=(?=[\w'])")


def in_labels(words: str, fields: Sequence[Field]) -> str:
    """A refusal in the words of the form: "tensor=7" becomes "Tensor ranks 7"."""
    labels = LABELS | {field.name: field.label for field in fields}
    return NAMED.sub(lambda match: labels.get(match[1], match[1]) + " ", words)


def pipeline(
    schedule: str,
    ranks: int,
    micro_batches: int,
    forward: float,
    backward_input: float,
    backward_weight: float,
    p2p: float,
) -> str:
    """A schedule's timeline, its bubble and what each rank keeps."""
    made = SCHEDULES[schedule](ranks, micro_batches)
    validate(made)
    part = 1 / made.chunks  # the times entered are those of a rank's whole part
    played = simulate(
        made, forward * part, backward_input * part, backward_weight * part, p2p=p2p
    )
    rows = [
        ("Time of the step", f"{played.makespan:.4g}"),
        ("Time in which a rank computes", f"{played.work:.4g}"),
        ("Longest idle time of a rank", f"{max(played.idle):.4g}"),
        ("Bubble: idle / work", f"{played.bubble_over_ideal:.1%}"),
        ("Share of the time idle", f"{played.idle_fraction:.1%}"),
        (
            "Micro-batches kept, by rank",
            ", ".join(f"{peak:g}" for peak in played.peak_activations),
        ),
        ("Copies of the weights", f"{played.parameter_copies}"),
    ]
    words = f"{schedule} on {ranks} ranks with {micro_batches} micro-batches"
    drawing = (
        f'<div class="xt-scroll" tabindex="0" data-span="{played.makespan}">'
        f"{render_svg(played)}</div>"
    )
    return drawing + html_table(words, ("", "Simulated"), rows)


CALCULATORS = {
    "memory": Calculator("Memory calculator", MEMORY_FIELDS, memory),
    "best": Calculator("Plan a run", BEST_FIELDS, best),
    "layouts": Calculator("Layout planner", LAYOUT_FIELDS, layouts),
    "pipeline": Calculator(
        "Pipeline explorer",
        (
            Choice("schedule", "Schedule", "one_f_one_b", tuple(SCHEDULES)),
            Number("ranks", "Pipeline ranks", 4, 1, 16),
            Number("micro_batches", "Micro-batches", 8, 1, 64),
            Number("forward", "Time of a forward", 1.0, 0, 1000, 0),
            Number("backward_input", "Time of input gradients", 1.0, 0, 1000, 0),
            Number("backward_weight", "Time of weight gradients", 1.0, 0, 1000, 0),
            Number("p2p", "Time of a message", 0.0, 0, 1000, 0),
        ),
        pipeline,
    ),
}
