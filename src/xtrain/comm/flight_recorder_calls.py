"""A call of a flight recorder: what is kept of it, and how its state is learnt.

    begun ---------- the method returns a work ---------- the work ends, or is gone
    line, tensors        weak reference                       time of the end

A call keeps no tensor and no work alive. A work that is gone has been waited for, or
given up.
"""

import os
import sys
import sysconfig
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from xtrain.comm.call_observer import tensors_of

Line = dict[str, Any]  # filename, line, name
MESSAGES = {"send": "->", "recv": "<-", "recv_anysource": "<-"}

_XTRAIN = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_LIBRARY = (
    os.path.dirname(torch.__file__) + os.sep,
    sysconfig.get_path("stdlib") + os.sep,
    *(
        os.path.join(_XTRAIN, room, "")
        for room in ("comm", "backends", "cluster", "testing")
    ),
    "<frozen",
)


def is_program(file: str) -> bool:
    """Whether a line of this file tells where a call is made: it lies outside torch,
    Python's own library, our backends and their instruments.
    """
    return not file.startswith(_LIBRARY)


def line_of(frame: FrameType | None) -> Line:
    """The innermost line of the program, see `is_program`."""
    while frame is not None:
        code = frame.f_code
        if is_program(code.co_filename):
            return {
                "filename": code.co_filename,
                "line": frame.f_lineno,
                "name": code.co_name,
            }
        frame = frame.f_back
    return {"filename": "?", "line": 0, "name": "?"}


class RecordedCall:
    """One call of this rank.

    Attributes: `op`, `group` (its name), `number` (from 1, among calls of its `kind`:
    the group's collectives, or its messages of one direction, peer and tag), `root` and
    `peer` (ranks in the group), `tag`, `inputs` and `outputs` (shape and dtype of each
    tensor), `line`, `created` and `ended` (ns since the epoch), `error`.
    """

    __slots__ = (
        "__weakref__", "created", "ended", "error", "group", "inputs", "kind", "line",
        "number", "op", "outputs", "peer", "root", "tag", "work",
    )  # fmt: skip

    def __init__(self, op: str, group: str, args: Sequence[Any]):
        self.op, self.group, self.number = op, group, 0
        outputs = tensors_of(args[0]) if args else []
        inputs = tensors_of(args[1]) if len(args) > 1 else []
        self.outputs = [(tensor.shape, tensor.dtype) for tensor in outputs]
        self.inputs = [(tensor.shape, tensor.dtype) for tensor in inputs]
        self.inputs = self.inputs or self.outputs
        self.root = getattr(args[-1], "rootRank", None) if args else None
        self.kind: tuple[Any, ...] = (group,)
        self.peer = self.tag = None
        if op in MESSAGES:
            *peer, self.tag = [None, *(arg for arg in args if isinstance(arg, int))]
            self.peer = peer[1] if len(peer) > 1 else None
            self.kind = (group, op, self.peer, self.tag)
        self.line = line_of(sys._getframe(1))
        self.created, self.ended, self.error = time.time_ns(), 0, ""
        self.work: Callable[[], Any] | None = None

    def follow(self, work: Any) -> None:
        """Learn from the work when the call ends. None: it is part of a batch."""
        if work is None:
            return
        if type(work) is not dist.Work and _state_of(work) == "completed":
            self.ended = time.time_ns()
            return
        try:
            self.work = weakref.ref(work, self._gone)
        except TypeError:  # a message of a virtual cluster, which takes none
            self.work = lambda: work

    def _gone(self, _: object) -> None:
        self.ended = time.time_ns()

    def is_alive(self) -> bool:
        """Whether the program still has its work."""
        return self.work is not None and self.work() is not None

    def state(self) -> str:
        """ "started", "completed" or "failed"; safe on any thread."""
        work = self.work and self.work()  # first, as it may go while this is read
        if self.error or self.ended:
            return "failed" if self.error else "completed"
        return "started" if work is None else _state_of(work)

    def entry(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """The call as torch's recorder writes it, and what that leaves out."""
        name, message = self.op, self.op in MESSAGES
        if message:
            peer = "?" if self.peer is None else self.peer
            ends = f"{group['own']}{MESSAGES[name]}{peer}"
            name = f"{name.removesuffix('_anysource')} {ends}"
        return {
            "process_group": [self.group, group["desc"]],
            "profiling_name": f"{group['backend']}:{name}",
            "collective_seq_id": 0 if message else self.number,
            "p2p_seq_id": self.number if message else 0,
            "is_p2p": message,
            "tag": self.tag,
            "root": self.root,
            "input_sizes": [list(shape) for shape, _ in self.inputs],
            "input_dtypes": [str(dtype)[6:] for _, dtype in self.inputs],
            "output_sizes": [list(shape) for shape, _ in self.outputs],
            "output_dtypes": [str(dtype)[6:] for _, dtype in self.outputs],
            "state": self.state(),
            "error": self.error,
            "time_created_ns": self.created,
            "time_discovered_completed_ns": self.ended or None,
            "frames": [self.line],
        }


def _state_of(work: Any) -> str:
    """What a work tells by itself.

    A work of a virtual cluster lets time pass when it is asked, so its call is read.
    """
    call = getattr(work, "_call", work)
    if hasattr(call, "end"):
        if call.error is not None:
            return "failed"
        return "started" if call.end is None else "completed"
    if not work.is_completed():
        return "started"
    try:
        future = work.get_future()
    except RuntimeError:  # a message on gloo has none
        return "completed"
    try:
        future.value()
    except RuntimeError:
        return "failed" if future.done() else "started"
    return "completed"
