"""What the cases of a file gave, as records that go from process to process."""

import json
import re
import sys
from dataclasses import dataclass, field
from typing import Any

FILE = "<your file>"
"""The reader's file, in tracebacks."""


def line_here() -> int:
    """The innermost line of the reader's file that is being executed, or 0."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == FILE:
            return int(frame.f_lineno)
        frame = frame.f_back
    return 0


PLACES = re.compile(r"( at)? ?(<your file>|/[\w/.-]+\.py):\d+| at 0x[0-9a-f]+")
"""Where two files that make the same mistake may differ."""


@dataclass
class Noted:
    """A comparison on one rank."""

    what: str
    right: bool
    problem: str = ""
    digest: tuple[float, ...] = ()
    """Tells wrong results apart."""


@dataclass
class Counted:
    """What one rank sent in a part of the check."""

    formula: str
    messages: int
    nbytes: float
    expected: float
    rounds: float
    held: float = 0.0
    """Most bytes at one time of tensors made there."""


@dataclass
class Outcome:
    """What one case gave; the lists have one entry a rank."""

    case: str
    error: str = ""
    words: str = ""
    lines: list[int] = field(default_factory=list)
    noted: list[list[Noted]] = field(default_factory=list)
    counted: list[list[Counted]] = field(default_factory=list)
    calls: dict[str, int] = field(default_factory=dict)
    """Operations of torch.distributed, with a line that makes each."""

    @property
    def right(self) -> bool:
        """Nothing was raised, all values are right, and every byte."""
        every = [note.right for notes in self.noted for note in notes]
        return not self.error and all(every) and not self.bytes_off()

    def bytes_off(self) -> list[tuple[int, Counted]]:
        """Ranks that did not send what the formula gives."""
        return [
            (rank, one)
            for rank, counts in enumerate(self.counted)
            for one in counts
            if abs(one.nbytes - one.expected) > 0.01
        ]

    def alike(self) -> Any:
        """Equal for two files that do the same: without lines.

        Rounds tell only those apart that are right but slow.
        """
        numbers = [
            [(n.what, n.right, [float(f"{d:.5g}") for d in n.digest]) for n in notes]
            for notes in self.noted
        ]
        sent = [
            [(c.messages, c.nbytes, round(c.rounds) if self.right else 0) for c in cs]
            for cs in self.counted
        ]
        words = PLACES.sub("", self.words)
        return repr((self.case, self.error, words, numbers, sent))


def encoded(outcomes: list[Outcome]) -> str:
    """As JSON."""
    return json.dumps(outcomes, default=lambda value: vars(value))


def decoded(text: str) -> list[Outcome]:
    """Of `encoded`."""
    found = []
    for values in json.loads(text):
        noted = [[Noted(**n) for n in notes] for notes in values.pop("noted")]
        counted = [[Counted(**c) for c in cs] for cs in values.pop("counted")]
        for note in (n for notes in noted for n in notes):
            note.digest = tuple(note.digest)
        found.append(Outcome(**values, noted=noted, counted=counted))
    return found
