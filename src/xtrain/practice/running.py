"""Where the ranks of a case run: on the virtual cluster; in a page, by replay.

Both count a second for a message, whatever its size.
"""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType
from typing import Any

import torch

from xtrain.practice.outcomes import FILE

LIMIT = 5.0
"""Seconds that a rank may run without a call: more is an endless loop."""


def line_here() -> int:
    """The innermost line of the reader's file that is being executed, or 0."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == FILE:
            return int(frame.f_lineno)
        frame = frame.f_back
    return 0


if hasattr(torch, "STAND_IN"):
    from xtrain.practice.replay import alone, kept, now, on_ranks, prepared
else:
    from xtrain.cluster import VirtualCluster, flat, now

    def on_ranks(size: int, program: Callable[..., Any], *args: Any) -> None:
        """Run `program(*args)` on so many ranks."""
        VirtualCluster(size, flat(1.0, 1e15), limit=LIMIT).run(program, *args)

    def kept(form: Any) -> Any:
        """The reader's function, as it is called."""
        return form

    def prepared(source: str) -> CodeType:
        """A file's code, as it is executed."""
        return compile(source, FILE, "exec")

    @contextlib.contextmanager
    def alone() -> Iterator[None]:
        """Of a check without ranks."""
        yield


__all__ = ["alone", "kept", "line_here", "now", "on_ranks", "prepared"]
