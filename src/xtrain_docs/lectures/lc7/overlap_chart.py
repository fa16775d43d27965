"""The drawing of runs by the clock: for each a lane of compute, messages and waits."""

from collections.abc import Mapping
from typing import Any

from ...svg import TimeAxis, document, fit, rect, text

Found = dict[str, Any]
WIDTH, LEFT, HIGH, TOP = 400, 78, 88, 62
LETTERS = {"attention": "A", "dispatch": "D", "mlp": "M", "combine": "C"}
"""What stands in a box: one letter, so that it fits the shortest of them."""
NARROWEST = 11.0
"""Units of width that a letter needs."""
KEY = "A attention · D dispatch · M experts (MLP) · C combine"
FAINT = 0.4
"""Opacity of what carries a letter."""
COLOURS = {"F": 2, "B": 1, "F0": 2, "F1": 3}
WORDS = {
    "F": "forward of one micro-batch",
    "B": "backward of another",
    "F0": "micro-batch 0",
    "F1": "micro-batch 1",
}
LANES = ("computes", "network", "waits")


def chart(rows: Mapping[str, Found], title: str, words: str) -> str:
    """The runs one below the other, over the same time."""
    axis = TimeAxis(max(run["total"] for run in rows.values()), LEFT, WIDTH)
    batches = dict.fromkeys(e[0] for run in rows.values() for e in run["events"])
    parts: list[str] = []
    for at, batch in enumerate(batches):
        said = WORDS[batch]
        parts.append(rect(6 + 196 * at, 6, 18, 9, COLOURS[batch], opacity=FAINT,
                          radius=2, hover=said))  # fmt: skip
        parts.append(text(28 + 196 * at, 15, said, "xt-tick"))
    parts.append(text(6, 33, KEY, "xt-tick"))
    for number, (name, run) in enumerate(rows.items()):
        top = TOP + number * HIGH
        parts.append(text(6, top, name, "xt-label"))
        for lane, what in enumerate(LANES):
            parts.append(text(12, top + 16 + 20 * lane, what, "xt-tick"))
        parts += lanes(run, top, axis)
    bottom = TOP + HIGH * len(rows) - 14
    parts += [axis.base(bottom), *axis.ends(bottom + 15)]
    return fit(document(WIDTH, bottom + 22, parts, title, words), WIDTH)


def lanes(run: Found, top: float, axis: TimeAxis) -> list[str]:
    """The boxes of one run."""
    parts = []

    def add(lane: int, batch: str, what: str, begin: float, end: float) -> None:
        colour, opacity = (0, 1.0) if lane == 2 else (COLOURS[batch], FAINT)
        y = top + 4 + 20 * lane
        said = f"{batch} {what}"
        parts.append(axis.bar(said, begin, end, y, 16, colour, opacity, least=1.0))
        at, wide = axis.at(begin), axis.at(end) - axis.at(begin)
        letter = LETTERS.get(what, "")
        if letter and lane < 2 and wide > NARROWEST:
            parts.append(text(at + wide / 2, y + 12, letter, "xt-label", "middle"))

    for batch, chunk, kind, begin, end in run["events"]:
        if kind == "compute":
            add(0, batch, chunk, begin, end)
        elif kind == "wait":
            add(2, batch, chunk, begin, end)
    for batch, chunk, begin, end in run["messages"]:
        add(1, batch, chunk, begin, min(end, axis.last))
    return parts
