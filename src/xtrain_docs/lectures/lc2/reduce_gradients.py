"""The gradients of two ranks when nothing, the loss, or the gradient is reduced."""

import re
from statistics import fmean

from ... import config
from ...figures import REGISTRY
from ...svg import Axis, bar_chart, fit

PRINTED = re.compile(r"(rank \d), (\w+ reduced): .*gradient ([\d.]+)")


@REGISTRY
def what_is_reduced(transcript: str) -> str:
    """From what the page's program printed."""
    printed = (config.ROOT / "snippets" / transcript).read_text()
    bars: dict[str, dict[str, float]] = {}
    for rank, reduced, gradient in PRINTED.findall(printed):
        bars.setdefault(reduced, {})[rank] = float(gradient)
    mean = fmean(bars["nothing reduced"].values())
    mark = (mean, f"one process: {mean:g}")
    title = "The gradient on two ranks"
    return fit(bar_chart(bars, Axis("gradient"), title, reference=mark), 400)
