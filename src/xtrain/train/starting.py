"""A start that hangs ends: torch's store waits in C++, beyond its own timeout.

    rank 1   new_group -> store.wait -> timed out -> cancels, waits for the answer ...
                |                                       the store's node is cut off
                +-- this thread: timeout + 5 s in one call -> place, exit status 1

Ranks meet, and make their groups, through a store on one of the nodes. Calls of the
groups themselves end with an error at the timeout.
"""

import threading
import time
import traceback
from types import FrameType, TracebackType
from typing import Self

import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout

from xtrain.comm.flight_recorder_watch import Watch, frame_of
from xtrain.comm.mesh import timeout_of
from xtrain.train.phases import Place, call_in, is_through
from xtrain.train.stopping import end_now

MARGIN = 5.0  # seconds beyond the timeout, at which most calls end by themselves


class Starting:
    """A context manager: this process ends if a call hangs in the phase "start".

    Args:
        place: of this rank; named when it ends.
        timeout: seconds of a call; torch's own if None. A default group that is there
            already has one of its own.
    """

    def __init__(self, place: Place, timeout: float | None = None):
        self.place, self.timeout = place, timeout
        self._frame: FrameType | None = None

    def __enter__(self) -> Self:
        there = timeout_of(None) if dist.is_initialized() else None
        if there or self.timeout is None:
            self.timeout = (there or default_pg_timeout).total_seconds()
        self._limit = self.timeout + MARGIN
        self._thread, self._since = threading.get_ident(), time.monotonic()
        self._watch = Watch(lambda: None, self._look, None)
        return self

    def __exit__(self, *_: object) -> None:
        self._watch.stop()

    # -- in the thread

    def _look(self) -> None:
        """The innermost frame stays the same one as long as C++ does not return."""
        starting = self.place.phase == "start"
        frame = frame_of(self._thread) if starting else None
        if frame is None or frame is not self._frame:
            self._frame, self._since = frame, time.monotonic()
            return
        seconds = time.monotonic() - self._since
        if seconds > self._limit and is_through(frame.f_code):
            end_now(f"{self.place}, {hung(frame)}: no answer in {seconds:.0f} s", 1)


def hung(frame: FrameType) -> str:
    """The call of torch.distributed that a rank is in, its line, and its group."""
    trace, group = None, ""
    for outer, line in traceback.walk_stack(frame):
        trace = TracebackType(trace, outer, outer.f_lasti, line)
        group = group or outer.f_locals.get("group_desc") or ""
    return f"in {call_in(trace)}" + (f", group {group}" if group else "")
