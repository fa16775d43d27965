"""The messages of one `batch_isend_irecv`, which NCCL starts as one group.

torch 2.13 brackets the calls of a batch for its own backends only; a group in Python
sees one call after the other. So the batch is found where torch holds it: in the frame
of its function.
"""

import sys
from collections.abc import Callable
from types import FrameType

import torch.distributed as dist

from xtrain.backends.nccl_rules.messages import End
from xtrain.backends.nccl_rules.streams import BatchPart, StreamWork


class Batches:
    """Collects the messages of a batch, and posts them when it is complete."""

    def __init__(self, post: Callable[[list[End]], StreamWork]):
        self._post = post
        self.bracketed = False  # torch has announced the batch, and tells its end
        self._begin(None)

    def _begin(self, frame: FrameType | None) -> None:
        self._frame = frame
        self._ends: list[End] = []
        self._parts: list[BatchPart] = []

    def start(self) -> None:
        """The calls up to `end` are one batch."""
        self.bracketed = True
        self._begin(None)

    def end(self) -> StreamWork:
        """Post the batch, and return its work."""
        work = self._post(self._ends)
        for part in self._parts:
            part.batch = work
        self.bracketed = False
        self._begin(None)
        return work

    def add(self, end: End, frame: FrameType | None) -> dist.Work:
        """Add a message; with the last one of the frame's list, post the batch."""
        if frame is not self._frame:  # a batch that was refused half way is dropped
            self._begin(frame)
        self._ends.append(end)
        if frame and len(self._ends) == len(frame.f_locals["p2p_op_list"]):
            return self.end()
        self._parts.append(BatchPart([end.tensor]))
        return self._parts[-1]


def frame_of_batch() -> FrameType | None:
    """The frame of `batch_isend_irecv`, if torch calls from there."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_name == "batch_isend_irecv" and "p2p_op_list" in code.co_varnames:
            return frame
        frame = frame.f_back
    return None
