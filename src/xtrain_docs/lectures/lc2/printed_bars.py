"""Bars of what programs printed: gradients of two ranks, losses of tokens."""

import re
from statistics import fmean

from ... import config
from ...figures import REGISTRY
from ...svg import Axis, bar_chart

REDUCED = re.compile(r"(rank \d), (\w+ reduced): .*gradient ([\d.]+)")
LOSSES = re.compile(r"^(.*?): ([\d. ]+)$", re.MULTILINE)
SHORT = {"mean of the ranks' means": "mean of means",
         "sums, divided by the global count": "sums over count"}  # fmt: skip


def printed(pattern: re.Pattern[str], transcript: str) -> list[tuple[str, ...]]:
    """What a pattern finds in an .out file of snippets/."""
    return pattern.findall((config.ROOT / "snippets" / transcript).read_text())


@REGISTRY
def what_is_reduced(transcript: str) -> str:
    """The gradient of each rank when nothing, the loss, or the gradient is reduced."""
    bars: dict[str, dict[str, float]] = {}
    for rank, reduced, gradient in printed(REDUCED, transcript):
        bars.setdefault(reduced, {})[rank] = float(gradient)
    mean = fmean(bars["nothing reduced"].values())
    mark = (mean, f"one process: {mean:g}")
    title = "The gradient on two ranks"
    return bar_chart(bars, Axis("gradient"), title, reference=mark)


@REGISTRY
def weighed_tokens(transcript: str) -> str:
    """From what the page's program printed: a number, or the losses of a rank."""
    rows = printed(LOSSES, transcript)
    found = {name: [float(number) for number in row.split()] for name, row in rows}
    right = found["one process"][0]
    bars = {
        f"rank {rank}": {
            f"token {place}": loss
            for place, loss in enumerate(found[f"losses of rank {rank}"])
        }
        for rank in (0, 1)
    }
    bars |= {short: {"mean": found[name][0]} for name, short in SHORT.items()}
    mark = (right, f"one process: {right:g}")
    title = "Two means of the same tokens"
    return bar_chart(bars, Axis("loss"), title, reference=mark)
