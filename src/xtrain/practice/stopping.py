"""Ends a loop of the reader's file that does not end by itself.

Python tells of every jump in the code that is watched, and now and then the clock is
read. A loop inside C, or one that catches everything, goes on: the page ends its worker
then.
"""

import contextlib
import io
import sys
import time
from collections.abc import Iterator
from types import CodeType
from typing import Any

TICKS = 256
"""Jumps between two looks at the clock."""


TOO_LARGE = 27
"""The error number of Linux; a browser's Python has another one."""


class TooLong(BaseException):
    """The file ran for longer than it may."""


class Clock:
    """The end that is set, and the jumps since the clock was read."""

    end: float | None = None
    ticks = 0

    def tick(self, *_: Any) -> None:
        """Raises TooLong once the time is over."""
        self.ticks += 1
        if self.ticks % TICKS == 0 and self.end and time.perf_counter() > self.end:
            raise TooLong


CLOCK = Clock()


@contextlib.contextmanager
def deadline(seconds: float) -> Iterator[None]:
    """What is watched and runs in this block ends after some seconds."""
    CLOCK.end = time.perf_counter() + seconds
    try:
        yield
    finally:
        CLOCK.end = None


def watch(code: CodeType) -> None:
    """Have a file's code, and that of its functions, looked at. From Python 3.12 on."""
    monitoring: Any = getattr(sys, "monitoring", None)
    if monitoring is None:
        return
    tool, events = monitoring.DEBUGGER_ID, monitoring.events
    wanted = events.JUMP | events.PY_START | branches(events)
    if monitoring.get_tool(tool) is None:
        monitoring.use_tool_id(tool, "drills")
        for event in (1 << n for n in range(wanted.bit_length())):
            if event & wanted:
                monitoring.register_callback(tool, event, CLOCK.tick)
    monitoring.set_local_events(tool, code, wanted)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            watch(constant)


def branches(events: Any) -> int:
    """From Python 3.14 on there are two kinds."""
    if hasattr(events, "BRANCH_LEFT"):
        return int(events.BRANCH_LEFT | events.BRANCH_RIGHT)
    return int(events.BRANCH)


class Printed(io.TextIOBase):
    """What a file prints: the beginning is kept, and there is a limit."""

    def __init__(self, kept: int = 2000, most: int = 16 << 20):
        self.text, self.count, self.kept, self.most = "", 0, kept, most

    def write(self, text: str) -> int:
        """Raises OSError beyond the limit, as a process whose files are limited."""
        self.count += len(text)
        if self.count > self.most:
            raise OSError(TOO_LARGE, "File too large")
        self.text += text[: self.kept - len(self.text)]
        return len(text)
