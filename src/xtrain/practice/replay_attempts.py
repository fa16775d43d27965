# mypy: disable-error-code="attr-defined"
"""One rank that is run again and again, and what its calls return.

    attempt 1   send    recv: has not come, the attempt is given up
    attempt 2   send    recv    all_reduce: given up
                \\- calls of attempt 1, found again by their order

An attempt is given up by an exception that ordinary code does not catch. A file that
catches all of them goes on without effect: its calls return at once.
"""

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from xtrain.practice.outcomes import FILE
from xtrain.practice.replay_calls import Call
from xtrain.practice.stopping import Printed


class Parked(BaseException):
    """The rank has to wait: this attempt is over."""


class InFlightError(RuntimeError):
    """A tensor changed between a call and the end of its work."""


class Work:
    """The handle of a call.

    Args:
        go_on: called by `wait`: gives the attempt up, or writes what the call brings.
    """

    def __init__(
        self, go_on: "Callable[[Work], None]", call: Call, given: Sequence[Tensor],
        taken: Sequence[Tensor],
    ):  # fmt: skip
        self.go_on, self.call = go_on, call
        self.given, self.taken = list(given), list(taken)
        self.given_were = [tensor.values() for tensor in self.given]
        self.taken_were = [tensor.values() for tensor in self.taken]

    def __deepcopy__(self, memo: Any) -> "Work":
        return self

    def wait(self, timeout: Any = None) -> bool:
        """Give this attempt up, or go on with what the call brings."""
        self.go_on(self)
        return True

    def is_completed(self) -> bool:
        return self.wait()

    is_success = is_completed

    def get_future(self) -> Any:
        raise RuntimeError("futures cannot be had in a page")

    def check(self) -> None:
        """InFlightError if one of its tensors is not as it was."""
        for what, tensors, were in (
            ("input", self.given, self.given_were),
            ("output", self.taken, self.taken_were),
        ):
            if [tensor.values() for tensor in tensors] != were:
                raise InFlightError(
                    f"{self.call.words}: its {what} was changed before it was waited "
                    f"for, while it was in flight"
                )


class Nothing(Work):
    """What calls give an attempt that is over."""

    def __init__(self) -> None:
        pass

    def wait(self, timeout: Any = None) -> bool:
        return True


class Rank:
    """One rank, over all its attempts.

    Attributes:
        calls: that it has made, in their order; `at` is the next one's number.
        kept: for each call of the reader's function that has returned, what does the
            same at once; `of` is the next one's number.
        open: works of this attempt that have not been waited for.
        over: this attempt has been given up.
        waits: the call for which it has been given up.
        phase: the barrier that all must have reached before its next call.
    """

    def __init__(self, number: int):
        self.number, self.done = number, False
        self.calls: list[Call] = []
        self.kept: list[Callable[[Any], Any]] = []
        self.error: BaseException | None = None
        self.result: Any = None
        self.begin()

    def begin(self) -> None:
        """Another attempt."""
        self.at = self.of = self.groups = 0
        self.clock, self.over = 0.0, False
        self.printed = Printed()
        self.open: list[Work] = []
        self.counts: dict[Any, int] = {}
        self.waits: Call | None = None
        self.phase: Call | None = None

    def can_go(self) -> bool:
        """Has what it waits for come?"""
        call = self.waits
        return call is None or call.end is not None or call.error is not None

    def call(
        self, kind: str, tensor: Tensor | None, group: Any, line: int,
        peer: int | None = None, more: str = "",
    ) -> tuple[Call, bool]:  # fmt: skip
        """The call of this ordinal, and whether it is made for the first time."""
        shown, numbers, dtype = "", 0, ""
        if tensor is not None:
            numbers, dtype = tensor.numel(), tensor.dtype.name
            shown = f"{list(tensor.shape)} {dtype}"
        words = f"{kind}({shown}{more}){group.in_words()}"
        words += f" at {FILE}:{line}" * bool(line)
        new = self.at == len(self.calls)
        if new:
            others = [r for r in group.ranks if r != self.number]
            missing = others if peer is None else [peer]
            self.calls.append(
                Call(self.number, kind, words, line, numbers, dtype, self.clock,
                     missing, peer)
            )  # fmt: skip
        call = self.calls[self.at]
        if (call.kind, call.numbers, call.line) != (kind, numbers, line):
            raise RuntimeError(
                f"the file does not do the same when it is run again: {call.words} "
                f"was {words} (time, id() or an unseeded random number?)"
            )
        self.at += 1
        return call, new

    def ended(self, call: Call) -> float:
        """When a call has ended; if it has not, this attempt is given up."""
        if call.error is not None:
            raise call.error
        if call.end is None:
            self.waits, self.over = call, True
            raise Parked
        return call.end

    def enter_phase(self) -> None:
        """Wait for the ranks that have not reached the last barrier."""
        if self.phase is not None:
            self.ended(self.phase)
            self.phase = None

    def finish(self, work: Work) -> None:
        """Go on with what a call has brought; give the attempt up if it has not."""
        end = self.ended(work.call)
        work.check()
        self.open.remove(work)
        self.clock = max(self.clock, end)
        for tensor, values in zip(work.taken, work.call.payload, strict=False):
            tensor.write(values)
