"""FlightRecorder: this rank's last calls, in a file when the program hangs or fails.

    with FlightRecorder("dumps"):
        train()

    rank 0   calls 1 2 3 ... 998 999 --+
    rank 1   calls 1 2 3 ... 998 ------+--> dumps/rank-0.json, rank-1.json, ...
    rank 2   calls 1 2 3 ... 998 999 --+         |
                                           xtrain hang dumps/*.json

A rank keeps its last calls in a ring: operation, group, number in the group, shapes,
dtypes, peer, the line of the program, state and times. It sends no message. It writes
them to a file

    when a call has not ended after `stuck_after` seconds
    at SIGUSR2, also while its main thread waits inside C++
    when the program leaves it, by an exception or at its end
    when another rank that shares the folder has written for one of the first two
    reasons or for an exception: a touch of `dump-now` there is the wish

The file has the fields of torch's own flight recorder (NCCL, gloo), as JSON.
Cost: about 6 microseconds of the processor for each call, nothing for other operations.
"""

import atexit
import json
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any, Self

import torch.distributed as dist

from xtrain.comm.call_observer import CallObserver
from xtrain.comm.flight_recorder_calls import Line, RecordedCall, is_program, line_of
from xtrain.comm.flight_recorder_watch import Watch, frame_of
from xtrain.comm.transport_errors import in_short

WISH = "dump-now"


class FlightRecorder(CallObserver):
    """Records the calls of this rank; a context manager, or `start` and `stop`.

    Start it on all ranks at the same place, after `init_process_group`: calls are
    numbered from there. `stop` is called at the end of the process if not before.

    Args:
        folder: of the files `rank-0.json`, ...; made if it is not there. On one
            machine or a shared disk all ranks write as soon as one does.
        capacity: how many calls are kept.
        stuck_after: seconds after which a call that has not ended is reported. Less
            than the group's timeout, at which a backend may end the process.

    Raises:
        ValueError: a capacity below 1, a time that is not positive, or `start` without
            a process group or twice.
        OSError: from `start`, if the folder cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str] = "flight-recorder",
        capacity: int = 1000,
        stuck_after: float = 60.0,
    ):
        if capacity < 1 or not stuck_after > 0:
            raise ValueError(
                f"capacity={capacity} must be at least 1 and "
                f"stuck_after={stuck_after} positive"
            )
        self.folder, self.stuck_after = Path(folder), stuck_after
        self._ring: deque[RecordedCall] = deque(maxlen=capacity)
        self._counts: Counter[tuple] = Counter()
        self._groups: dict[str, dict[str, Any]] = {}
        self._watch: Watch | None = None
        self._writing = threading.Lock()
        self._reported: RecordedCall | None = None
        # Its last call and its line when another rank asked: where others missed it.
        self._asked: tuple[RecordedCall | None, Line | None] = None, None

    def start(self) -> Self:
        if self._watch is not None:
            raise ValueError("this flight recorder has been started already")
        if not dist.is_initialized():
            raise ValueError("a flight recorder starts after init_process_group")
        self._thread, self._world_size = threading.get_ident(), dist.get_world_size()
        self.rank = dist.get_rank()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.path.unlink(missing_ok=True)
        self._wish_seen = self._wish_time()
        super().__enter__()
        self._watch = Watch(lambda: self._report("SIGUSR2"), self._look)
        atexit.register(self._at_exit)
        return self

    def stop(self, error: BaseException | None = None) -> None:
        """End the recording and write the last state; a second call does nothing."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        atexit.unregister(self._at_exit)
        watch.stop()
        super().__exit__()
        if error is None:
            call, line = self._asked
            self.dump("ended", line if call is self._latest() else None)
            return
        lines = [
            {"filename": frame.filename, "line": frame.lineno, "name": frame.name}
            for frame in traceback.extract_tb(error.__traceback__)
            if is_program(frame.filename)
        ]
        text = f"{type(error).__name__}: {in_short(error)}"
        self._blame(text, lines)
        self._report(f"raised {text}", lines[-1] if lines else None)

    def _blame(self, text: str, lines: Sequence[Line]) -> None:
        """Mark the call that an error came out of: gloo's messages do not tell."""
        for call in reversed(self._ring):
            if call.is_alive() and (call.line in lines or call is self._reported):
                call.error = text
                return

    def _at_exit(self) -> None:
        self.stop(getattr(sys, "last_value", None))

    __enter__ = start

    def __exit__(self, kind: Any = None, error: Any = None, trace: Any = None) -> None:
        self.stop(error)

    @property
    def path(self) -> Path:
        """The file of this rank."""
        return self.folder / f"rank-{self.rank}.json"

    # -- the calls

    def observe(self, op: str, group: Any, args: Sequence[Any]) -> RecordedCall:
        name = group.group_name
        if name not in self._groups:
            self._groups[name] = described(group)
        call = RecordedCall(op, name, args)
        self._counts[call.kind] = call.number = self._counts[call.kind] + 1
        self._ring.append(call)
        return call

    def returned(self, kept: RecordedCall, work: Any) -> None:
        kept.follow(work)

    def failed(self, kept: RecordedCall, error: BaseException) -> None:
        kept.error = f"{type(error).__name__}: {in_short(error)}"

    def batch_returned(self, work: Any) -> None:
        """The work of a batch is the work of each of its calls."""
        group = self._ring[-1].group if self._ring else None
        calls = (call for call in reversed(self._ring) if call.group == group)
        for call in takewhile(lambda call: not call.ended and not call.work, calls):
            call.follow(work)

    def _latest(self) -> RecordedCall | None:
        return self._ring[-1] if self._ring else None

    # -- what its thread does

    def _look(self) -> None:
        wish = self._wish_time()
        if wish > self._wish_seen:
            self._wish_seen = wish
            self._asked = self._latest(), self._line()
            self.dump("another rank asked for it", self._asked[1])
        until = time.time_ns() - int(self.stuck_after * 1e9)
        early = takewhile(lambda call: call.created <= until, tuple(self._ring))
        call = next((one for one in early if one.state() == "started"), None)
        if call is not None and call is not self._reported:
            self._reported = call
            self._report(f"a call has not ended after {self.stuck_after:g} s")

    def _report(self, reason: str, line: Line | None = None) -> None:
        """Write, and have the other ranks write."""
        self.dump(reason, line)
        with _told():
            (self.folder / WISH).touch()
            self._wish_seen = self._wish_time()

    def _wish_time(self) -> int:
        try:
            return (self.folder / WISH).stat().st_mtime_ns
        except OSError:
            return 0

    def _line(self) -> Line:
        """Where the rank is now."""
        return line_of(frame_of(self._thread))

    # -- the file

    def dump(self, reason: str = "asked for", line: Line | None = None) -> Path:
        """Write the file of this rank: all of it, or none if the disk is full.

        Args:
            line: where the rank is; None takes it from its thread.
        """
        content = {
            "version": "xtrain-1", "rank": self.rank, "pid": os.getpid(),
            "host": socket.gethostname(), "world_size": self._world_size,
            "reason": reason, "time_ns": time.time_ns(),
            "frames": [line or self._line()],
            "pg_config": dict(self._groups),
            "entries": [c.entry(self._groups[c.group]) for c in tuple(self._ring)],
        }  # fmt: skip
        with self._writing, _told():
            unfinished = self.path.with_suffix(".part")
            unfinished.write_text(json.dumps(content))
            unfinished.replace(self.path)
        return self.path


@contextmanager
def _told() -> Iterator[None]:
    """A full disk is no reason to end: it is printed."""
    try:
        yield
    except OSError as problem:
        print(f"flight recorder: {problem}", file=sys.stderr)


def described(group: Any) -> dict[str, Any]:
    """What is kept of a group, under torch's names; `own` is this rank in it."""
    try:
        ranks = dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):  # torch has not registered it (yet)
        ranks = list(range(group.size()))
    return {"name": group.group_name, "desc": group.group_desc, "ranks": str(ranks),
            "own": group.rank(), "backend": group.name()}  # fmt: skip
