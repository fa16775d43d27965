"""Pictures of Adam's moments and of small steps in bfloat16."""

from ... import runs
from ...figures import REGISTRY
from ...svg import Axis, document, fit, line, line_chart, text

WIDTH, EDGE = 400, 394


@REGISTRY
def adam_moments(steps: int = 30, lr: float = 0.01) -> str:
    """Adam on one weight whose gradient is 1, then -1: its moments and its steps."""
    from .runs_values import adam_steps

    gradients = [1.0] * steps + [-1.0] * steps
    (rows,) = runs.remembered(adam_steps, 1, gradients, lr)
    mean, root, step = (list(column) for column in zip(*rows, strict=True))
    series = {"gradient": gradients, "mean m": mean, "root of v": root,
              "step / rate": step}  # fmt: skip
    words = (
        f"The first mean is {mean[0]:.2g} and the first step {step[0]:.2g} times the "
        f"learning rate; when the gradient turns round, the mean needs "
        f"{sum(m > 0 for m in mean[steps:])} steps to do so"
    )
    return small_multiples(series, "Adam with a gradient that turns round", words)


def small_multiples(series: dict[str, list[float]], title: str, words: str) -> str:
    """One line above the other, each named at its left, all from -1 to 1."""
    left, high = 92, 68
    parts = []
    for row, (name, numbers) in enumerate(series.items()):
        zero = row * high + 34
        wide = (EDGE - left) / (len(numbers) - 1)
        points = " ".join(
            f"{left + i * wide:.1f},{zero - 24 * v:.1f}" for i, v in enumerate(numbers)
        )
        parts.append(text(6, zero + 4, name, "xt-label"))
        for level in (1, 0, -1):
            y = zero - 24 * level
            parts.append(line(left, y, EDGE, y, "xt-axis" if not level else "xt-grid"))
            parts.append(text(left - 6, y + 4, f"{level:g}", "xt-tick", "end"))
        parts.append(f'<polyline points="{points}" class="xt-line xt-s{row}"/>')
    bottom = high * len(series) + 6
    parts.append(text(left, bottom + 12, "step 1", "xt-tick"))
    last = f"step {len(next(iter(series.values())))}"
    parts.append(text(EDGE, bottom + 12, last, "xt-tick", "end"))
    return fit(document(WIDTH, bottom + 20, parts, title, words), WIDTH)


@REGISTRY
def bf16_steps(steps: int = 30, lr: float = 0.001) -> str:
    """A bfloat16 weight that takes small steps, alone and with an fp32 master."""
    from .runs_values import small_steps

    (found,) = runs.remembered(small_steps, 1, steps, lr)
    names = {"alone": "bf16 alone", "with a master": "bf16 with a master",
             "master": "its fp32 master"}  # fmt: skip
    lines = {
        words: [(float(i), value) for i, value in enumerate(found[name], start=1)]
        for name, words in names.items()
    }
    return line_chart(
        lines,
        Axis("steps", "linear", lambda n: f"{n:g}"),
        Axis("weight", "linear", lambda w: f"{w:.2f}", low=1 - 1.1 * steps * lr,
             high=1.0),
        "Small steps of a bf16 weight",
        f"Alone it stays at {found['alone'][-1]:g}; with a master it comes to "
        f"{found['with a master'][-1]:.4g}.",
        width=WIDTH,
    )  # fmt: skip
