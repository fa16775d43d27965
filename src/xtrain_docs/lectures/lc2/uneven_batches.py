"""Losses of tokens on two ranks, and two means of them."""

import re

from ... import config
from ...figures import REGISTRY
from ...svg import Axis, bar_chart, fit

PRINTED = re.compile(r"^(.*?): ([\d. ]+)$", re.MULTILINE)
SHORT = {"mean of the ranks' means": "mean of means",
         "sums, divided by the global count": "sums over count"}  # fmt: skip


@REGISTRY
def weighed_tokens(transcript: str) -> str:
    """From what the page's program printed: a number, or the losses of a rank."""
    printed = PRINTED.findall((config.ROOT / "snippets" / transcript).read_text())
    found = {name: [float(number) for number in row.split()] for name, row in printed}
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
    return fit(bar_chart(bars, Axis("loss"), title, reference=mark), 400)
