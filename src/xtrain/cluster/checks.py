"""Mistakes that show on a real network only now and then, found in every run.

a buffer changed while it is in flight     sums of its bytes: when the call is made,
                                           when bytes move, when it has been waited for
a work nobody waits for                    asked when a rank ends
a message that is never received           asked when all have ended
"""

import ctypes
import zlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from xtrain.cluster.works import VirtualCall


class InFlightError(RuntimeError):
    """A tensor changed between a call and the end of its work."""


class UnfinishedWork(RuntimeError):
    """A work that was never waited for, or a message that was never received."""


def sum_of(tensors: Sequence[Tensor]) -> list[int | None]:
    """A checksum of each tensor; None where it has no bytes in a row."""
    return [
        zlib.crc32((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
        if tensor.is_cpu and tensor.is_contiguous() and tensor.numel()
        else None
        for tensor in tensors
    ]


class InFlight:
    """The bytes of one call under way."""

    __slots__ = ("given", "given_sums", "open", "taken", "taken_sums")

    def __init__(
        self, given: Sequence[Tensor], taken: Sequence[Tensor],
        open_calls: dict[int, VirtualCall],
    ):  # fmt: skip
        self.given, self.taken, self.open = given, taken, open_calls
        self.given_sums, self.taken_sums = sum_of(given), sum_of(taken)

    def compare(self, call: VirtualCall, when: str) -> None:
        """Fail the call if its tensors are not as they were left."""
        for what, tensors, sums in (
            ("input", self.given, self.given_sums),
            ("output", self.taken, self.taken_sums),
        ):
            if sum_of(tensors) != sums:
                text = f"{call.describe()}: its {what} was changed {when}"
                error = InFlightError(f"{text}, while it was in flight")
                call.error = call.error or error
                if when == AFTER:
                    raise error

    def delivered(self) -> None:
        """Its outputs have been written by the call itself."""
        self.given_sums, self.taken_sums = sum_of(self.given), sum_of(self.taken)

    # -- called by messages and collectives --------------------------------------------

    def before_copy(self, send: VirtualCall, receive: VirtualCall) -> None:
        self.compare(send, BEFORE)
        if receive.checks is not None:
            receive.checks.compare(receive, BEFORE)

    def after_copy(self, receive: VirtualCall) -> None:
        self.delivered()

    def before_collective(self, work: VirtualCall) -> None:
        self.compare(work, BEFORE)

    def after_collective(self, work: VirtualCall) -> None:
        self.delivered()

    def after_wait(self, call: VirtualCall) -> None:
        if call.error is not None:
            raise call.error
        self.compare(call, AFTER)
        call.checks = None  # from now on they may change
        self.open.pop(id(call), None)


BEFORE = "before its bytes moved"
AFTER = "before it was waited for"


class Checks:
    """The calls of one cluster that have not been waited for."""

    def __init__(self) -> None:
        self._open: dict[int, VirtualCall] = {}

    def of_message(self, message: Any) -> InFlight:
        self._open[id(message)] = message
        tensors = [message.tensor]
        given, taken = (tensors, []) if message.kind == "send" else ([], tensors)
        return InFlight(given, taken, self._open)

    def of_collective(self, work: Any) -> InFlight:
        self._open[id(work)] = work
        return InFlight(work.part.inputs, work.part.outputs, self._open)

    def unwaited(self, rank: Any) -> list[VirtualCall]:
        """What a rank that has ended has not waited for."""
        calls = self._open.values()
        return [c for c in calls if c.rank is rank and not c.waited and not c.error]
