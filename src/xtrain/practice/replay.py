# mypy: disable-error-code="attr-defined,list-item,misc"
"""Ranks without threads: a rank is run until it needs a message that is not there.

    rank 0   runs, sends, waits       | runs again from its start, goes on, ends
    rank 1                 runs, sends, waits   | runs again ...

A browser has neither processes nor threads. So a rank that has to wait is given up (by
an exception that ordinary code does not catch), and run again from its start when what
it waits for has come: its calls find what they have already got. A message takes one
second of virtual time, as on `xtrain.cluster` with `flat(1.0, ...)`. Sends wait for
their receives, as gloo's do.

    Ranks(4).run(function, *args)
"""

import ast
import contextlib
import contextvars
import copy
import functools
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import CodeType, SimpleNamespace
from typing import Any

from torch import Tensor
from torch.distributed import ENGINE, serve
from torch.utils._python_dispatch import ACTIVE

from xtrain.comm.waits import Need, RankWaits, Wait, find_circle, in_words
from xtrain.practice.outcomes import FILE
from xtrain.practice.stopping import Printed, TooLong, deadline, watch
from xtrain.testing.errors import RankReport, RankTimeout, from_reports


class Parked(BaseException):
    """The rank has to wait: this attempt is over."""


class Deadlock(RuntimeError):
    """No rank can go on."""


class PeerEnded(RuntimeError):
    """A rank waits for one that has raised."""


class InFlightError(RuntimeError):
    """A tensor changed between a call and the end of its work."""


class UnfinishedWork(RuntimeError):
    """A work that was never waited for, or a message that was never received."""


class MismatchedCollectives(RuntimeError):
    """Ranks of a group are in different collectives."""


@dataclass(eq=False, slots=True)
class Call:
    """One call of one rank, which all its attempts share.

    Attributes:
        words: what it is, as "recv([4] float64, src=1) at <your file>:12".
        missing: the global ranks that it waits for.
        end: when it has ended, in virtual seconds; None until that is known.
        payload: what it brings, for each output.
    """

    rank: int
    kind: str
    words: str
    line: int
    numbers: int
    dtype: str
    posted: float
    missing: list[int]
    given: list[list[Any]] = field(default_factory=list)
    end: float | None = None
    payload: list[list[Any]] = field(default_factory=list)
    error: BaseException | None = None
    peer: int | None = None


@dataclass(slots=True)
class Meeting:
    """The k-th collective of a group."""

    calls: dict[int, Call] = field(default_factory=dict)
    signature: Any = None
    broken: bool = False


@dataclass(slots=True)
class Kept:
    """A call of the reader's function that has returned: what it did."""

    numbers: list[list[Any]]
    result: Any
    at: int
    clock: float
    counts: list[dict[str, Any]]
    open: "list[Work]"
    groups: int
    meetings: dict[Any, int]


class Rank:
    """One rank, over all its attempts.

    Attributes:
        calls: that it has made, in their order; `at` is the next one's number.
        kept: calls of the reader's function that have returned; `of` the next one's.
        open: works of this attempt that have not been waited for.
        over: this attempt has been given up.
        phase: the barrier that all must have reached before its next call.
    """

    def __init__(self, number: int):
        self.number = number
        self.calls: list[Call] = []
        self.kept: list[Kept] = []
        self.waits: Call | None = None
        self.phase: Call | None = None
        self.done, self.error, self.result = False, None, None
        self.begin()

    error: BaseException | None
    result: Any

    def begin(self) -> None:
        """Another attempt."""
        self.at = self.of = self.groups = 0
        self.clock, self.over = 0.0, False
        self.printed = Printed()
        self.open: list[Work] = []
        self.counts: dict[Any, int] = {}
        self.waits = self.phase = None


class Work:
    """The handle of a call."""

    def __init__(
        self, ranks: "Ranks", call: Call, given: Sequence[Tensor],
        taken: Sequence[Tensor],
    ):  # fmt: skip
        self.ranks, self.call = ranks, call
        self.given, self.taken = list(given), list(taken)
        self.given_were = [tensor.values() for tensor in self.given]
        self.taken_were = [tensor.values() for tensor in self.taken]

    def __deepcopy__(self, memo: Any) -> "Work":
        return self

    def wait(self, timeout: Any = None) -> bool:
        """Give this attempt up, or go on with what the call brings."""
        self.ranks.wait(self)
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
            for tensor, values in zip(tensors, were, strict=True):
                if tensor.values() != values:
                    raise InFlightError(
                        f"{self.call.words}: its {what} was changed before it was "
                        f"waited for, while it was in flight"
                    )


class Ranks:
    """Some ranks, run in turn.

    Args:
        limit: seconds that a rank may run without a call.
        buffered: a send ends at once, as if it were copied into a buffer.
        watch: called with each message when its ends have met.
    """

    seen: Callable[[], None] | None = None
    """Called when a rank makes a call, and when it goes on after a wait."""

    def __init__(
        self,
        size: int,
        limit: float = 2.0,
        buffered: bool = False,
        watch: Callable[[Call, Call], None] | None = None,
    ):
        self.size, self.limit, self.buffered, self.watch = size, limit, buffered, watch
        self.ranks = [Rank(number) for number in range(size)]
        self.current = self.ranks[0]
        self.waiting: dict[Any, deque[Call]] = {}
        self.any_source: dict[Any, deque[Call]] = {}
        self.meetings: dict[Any, Meeting] = {}
        self.keeps = True

    def run(self, program: Callable[..., Any], *args: Any) -> list[Any]:
        """`program(*args)` on every rank; what each returns.

        Raises RankError, as the virtual cluster does.
        """
        with serve(self):
            while ready := [r for r in self.ranks if not r.done and self.can_go(r)]:
                for rank in ready:
                    self.attempt(rank, program, args)
        if any(not rank.done for rank in self.ranks):
            self.stuck()
        failed = [rank for rank in self.ranks if rank.error is not None]
        if failed:
            reports = [self.report(rank) for rank in self.ranks]
            raise from_reports("the file", reports, None)
        left = [c for queue in self.waiting.values() for c in queue]
        if left and not self.buffered:
            lines = [f"  rank {c.rank}: {c.words}" for c in left[:8]]
            found = "messages without their other end:\n" + "\n".join(lines)
            raise UnfinishedWork(found)
        return [rank.result for rank in self.ranks]

    def can_go(self, rank: Rank) -> bool:
        call = rank.waits
        return call is None or call.end is not None or call.error is not None

    def attempt(self, rank: Rank, program: Callable[..., Any], args: Any) -> None:
        """Run a rank until it ends, fails or has to wait."""
        self.current = rank
        rank.begin()
        ACTIVE.clear()
        try:
            printed = contextlib.redirect_stdout(rank.printed)
            with deadline(self.limit), printed:
                context = contextvars.copy_context()  # what it sets is set for itself
                rank.result = context.run(program, *args)
            if rank.open:
                lines = [f"  {work.call.words}" for work in rank.open[:8]]
                raise UnfinishedWork("never waited for:\n" + "\n".join(lines))
            rank.done = rank.waits is None
        except Parked:
            pass
        except TooLong as stopped:
            who = f"rank {rank.number} let no other rank run for"
            raise too_long(stopped, who, self.limit, rank.number) from None
        except (Exception, SystemExit) as error:
            rank.error, rank.done = error, True
        if rank.waits is not None and rank.error is None:
            rank.done = False  # whatever the file has made of being given up

    def report(self, rank: Rank) -> RankReport:
        if rank.error is None:
            return RankReport(rank.number, "returned")
        # One that waits for a rank that has failed is not the cause.
        late = isinstance(rank.error, PeerEnded)
        return RankReport(
            rank.number, "raised", str(rank.error), exception=rank.error, at=late
        )

    def stuck(self) -> None:
        """No rank can go on: those that wait fail, with whom they wait for."""
        waiting = [rank for rank in self.ranks if not rank.done]
        failed = next((r for r in self.ranks if r.error is not None), None)
        if failed is not None:
            why = f"rank {failed.number} has raised {type(failed.error).__name__}"
            for rank in waiting:
                rank.error = PeerEnded(f"{self.words_of(rank)}: {why}")
            return
        states = []
        for rank in waiting:
            needs = tuple(Need(other) for other in self.missing(rank))
            wait = Wait(rank.number, self.words_of(rank), needs)
            states.append(RankWaits(rank.number, host=wait))
        circle = find_circle(states)
        text = in_words(circle) if circle else self.without_circle(waiting)
        for rank in waiting:
            rank.error = Deadlock(text)

    def without_circle(self, waiting: list[Rank]) -> str:
        here = {rank.number for rank in waiting}
        lines = ["deadlock: no rank can run"]
        for rank in waiting[:8]:
            over = [str(o) for o in self.missing(rank) if o not in here]
            why = f", but rank {', '.join(over)} has returned" if over else ""
            lines.append(f"  rank {rank.number}: {self.words_of(rank)}{why}")
        return "\n".join(lines)

    def missing(self, rank: Rank) -> list[int]:
        """The global ranks that one waits for."""
        call = rank.waits
        return [] if call is None else call.missing

    def words_of(self, rank: Rank) -> str:
        return "" if rank.waits is None else rank.waits.words

    # -- what the stand-in's torch.distributed calls -----------------------------------

    def message(
        self, kind: str, tensor: Tensor, peer: int | None, tag: int, group: Any,
        line: int,
    ) -> Work:  # fmt: skip
        """Post a send to a global rank, or a receive from it (None: from any)."""
        which = "dst" if kind == "send" else "src"
        words = f"{kind}({shape_of(tensor)}, {which}={'any' if peer is None else peer}"
        words += f", tag={tag}" * bool(tag) + f"){group.in_words()}{place(line)}"
        if self.current.over:
            return Nothing()
        self.enter_phase()
        number = self.current.number
        missing = [peer] if peer is not None else [
            r for r in group.ranks if r != number
        ]  # fmt: skip
        call, new = self.bound(kind, words, line, tensor, missing)
        if self.seen is not None:
            self.seen()
        if kind == "recv" and tensor.is_floating_point():
            tensor.write([float("nan")] * tensor.numel())
        given, taken = ([tensor], []) if kind == "send" else ([], [tensor])
        work = self.opened(call, given, taken)
        if new:
            call.peer = peer
            if kind == "send":
                call.given = [tensor.values()]
                self.post_send(call, (number, peer, tag, group.name))
            else:
                self.post_receive(call, (peer, number, tag, group.name))
        return work

    def post_send(self, call: Call, key: Any) -> None:
        if self.buffered:
            call.end = call.posted
        receives = self.waiting.get(("recv", *key))
        anyone = self.any_source.get(key[1:])
        if receives:
            self.match(call, receives.popleft())
        elif anyone:
            self.match(call, anyone.popleft())
        else:
            self.waiting.setdefault(("send", *key), deque()).append(call)

    def post_receive(self, call: Call, key: Any) -> None:
        if key[0] is not None:
            sends = self.waiting.get(("send", *key))
            if sends:
                self.match(sends.popleft(), call)
            else:
                self.waiting.setdefault(("recv", *key), deque()).append(call)
            return
        queues = [
            queue for (kind, _, *to), queue in self.waiting.items()
            if kind == "send" and (*to,) == key[1:] and queue
        ]  # fmt: skip
        if queues:
            self.match(min(queues, key=lambda q: q[0].posted).popleft(), call)
        else:
            self.any_source.setdefault(key[1:], deque()).append(call)

    def match(self, send: Call, receive: Call) -> None:
        """The two ends of a message have met."""
        if (send.numbers, send.dtype) != (receive.numbers, receive.dtype):
            text = f"{receive.words} is met by {send.words}"
            for call in (send, receive):
                call.error = RuntimeError(f"the two ends of a message differ: {text}")
            return
        receive.peer, receive.payload = send.rank, send.given
        end = max(send.posted, receive.posted) + 1.0
        receive.end = end
        send.end = send.end if self.buffered else end
        if self.watch is not None:
            self.watch(send, receive)

    def collective(
        self, name: str, group: Any, given: Sequence[Tensor], taken: Sequence[Tensor],
        signature: Any, combine: Callable[..., list[list[list[Any]]]], line: int,
        details: str = "", seconds: float = 1.0,
    ) -> Work:  # fmt: skip
        """Post this rank's part; `combine` gets all ranks' inputs, in group order."""
        if self.current.over:
            return Nothing()
        self.enter_phase()
        rank, first = self.current, next(iter([*given, *taken]), None)
        shown = details or (shape_of(first) if first is not None else "")
        words = f"{name}({shown}){group.in_words()}{place(line)}"
        missing = [r for r in group.ranks if r != rank.number]
        call, new = self.bound(name, words, line, first, missing)
        number = rank.counts[group.name] = rank.counts.get(group.name, 0) + 1
        if new:
            call.given = [tensor.values() for tensor in given]
            meeting = self.meetings.setdefault((group.name, number), Meeting())
            self.meet(meeting, call, group, (name, signature), combine, seconds)
        return self.opened(call, given, taken)

    def next_phase(self, group: Any) -> None:
        """A barrier of a check: what comes after it has clocks of its own.

        A rank goes on, and waits for the others only before its next call: what is
        computed until then is computed once.
        """
        rank = self.current
        if rank.over:
            return
        work = self.collective("barrier", group, [], [], (), nothing, 0)
        rank.open.remove(work)
        rank.phase, rank.clock = work.call, 0.0

    def enter_phase(self) -> None:
        """Wait for the ranks that have not reached the last barrier."""
        rank, call = self.current, self.current.phase
        if call is not None:
            self.ended(call)
            rank.phase = None

    def ended(self, call: Call) -> float:
        """When a call has ended; if it has not, this attempt is given up."""
        if call.error is not None:
            raise call.error
        if call.end is None:
            self.current.waits, self.current.over = call, True
            raise Parked
        return call.end

    def meet(
        self, meeting: Meeting, call: Call, group: Any, signature: Any,
        combine: Callable[..., list[list[list[Any]]]], seconds: float,
    ) -> None:  # fmt: skip
        calls = meeting.calls
        calls[call.rank] = call
        if meeting.broken or meeting.signature not in (None, signature):
            meeting.broken = True
            lines = [f"  rank {c.rank}: {c.words}" for c in calls.values()]
            text = "ranks are in different collectives:\n" + "\n".join(lines)
            for one in calls.values():
                one.error = MismatchedCollectives(text)
            return
        meeting.signature = signature
        for one in calls.values():
            one.missing = [r for r in group.ranks if r not in calls]
        if len(calls) < len(group.ranks):
            return
        found = combine([calls[r].given for r in group.ranks])
        end = max(c.posted for c in calls.values()) + seconds
        for r, payload in zip(group.ranks, found, strict=True):
            calls[r].payload, calls[r].end = payload, end
        if self.watch is not None and calls[group.ranks[0]].kind == "all_to_all_single":
            self.pieces(group, calls)

    def pieces(self, group: Any, calls: dict[int, Call]) -> None:
        """Tell of an all-to-all as of its messages."""
        assert self.watch is not None
        for source in group.ranks:
            for place, target in enumerate(group.ranks):
                part = replace(calls[source], given=[calls[source].given[place]])
                if target != source and part.given[0]:
                    self.watch(part, calls[target])

    def bound(
        self, kind: str, words: str, line: int, tensor: Tensor | None,
        missing: list[int],
    ) -> tuple[Call, bool]:  # fmt: skip
        """The call of this ordinal, and whether it is made for the first time."""
        rank = self.current
        numbers = tensor.numel() if tensor is not None else 0
        dtype = tensor.dtype.name if tensor is not None else ""
        new = False
        if rank.at < len(rank.calls):
            call = rank.calls[rank.at]
            if (call.kind, call.numbers, call.line) != (kind, numbers, line):
                raise RuntimeError(
                    f"the file does not do the same when it is run again: {call.words} "
                    f"was {words} (time, id() or an unseeded random number?)"
                )
        else:
            call = Call(
                rank.number, kind, words, line, numbers, dtype, rank.clock, missing
            )
            rank.calls.append(call)
            new = True
        rank.at += 1
        return call, new

    def opened(
        self, call: Call, given: Sequence[Tensor], taken: Sequence[Tensor]
    ) -> Work:
        work = Work(self, call, given, taken)
        self.current.open.append(work)
        return work

    def wait(self, work: Work) -> None:
        """Go on with what a call has brought; give the attempt up if it has not."""
        rank, call = self.current, work.call
        if rank.over or work not in rank.open:
            return
        end = self.ended(call)
        work.check()
        rank.open.remove(work)
        rank.clock = max(rank.clock, end)
        for tensor, values in zip(work.taken, call.payload, strict=False):
            tensor.write(values)
        if self.seen is not None:
            self.seen()

    # -- functions that are called once -----------------------------------------------

    def once(self, form: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function; if an attempt before has had its result, that."""
        rank, given = self.current, (args, kwargs)
        changing = any(
            callable(value) or getattr(value, "requires_grad", False)
            for value in walked(given)
        )
        if rank.over or changing or not self.keeps:
            return form(*args, **kwargs)
        if rank.of < len(rank.kept):
            rank.of += 1
            return self.again(rank, rank.kept[rank.of - 1], given)
        result = form(*args, **kwargs)
        if not rank.over:
            self.keep(rank, given, result)
        return result

    def keep(self, rank: Rank, given: Any, result: Any) -> None:
        numbers = [list(storage.data) for storage in storages_of(given)]
        shared = {id(s): s for s in storages_of(given)}
        alone = all(id(s) not in shared for s in storages_of(result))
        if not alone:  # a view of an argument: it is made again
            self.keeps = False
            return
        counts = [dict(vars(mode)) for mode in ACTIVE]
        rank.kept.append(
            Kept(numbers, copy.deepcopy(result), rank.at, rank.clock, counts,
                 list(rank.open), rank.groups, dict(rank.counts))
        )  # fmt: skip
        rank.of += 1

    def again(self, rank: Rank, one: Kept, given: Any) -> Any:
        for storage, numbers in zip(storages_of(given), one.numbers, strict=True):
            storage.data[:] = numbers
        rank.at, rank.clock, rank.open = one.at, one.clock, list(one.open)
        rank.groups, rank.counts = one.groups, dict(one.meetings)
        for mode, counts in zip(ACTIVE, one.counts, strict=True):
            kept = {k: v for k, v in counts.items() if k in ("messages", "nbytes")}
            vars(mode).update(kept)
        return copy.deepcopy(one.result)


def nothing(given: list[list[list[Any]]]) -> list[list[list[Any]]]:
    """What a barrier brings."""
    return [[] for _ in given]


class Nothing(Work):
    """What calls give an attempt that is over."""

    def __init__(self) -> None:
        pass

    def wait(self, timeout: Any = None) -> bool:
        return True


def walked(value: Any) -> Iterator[Any]:
    """A value and what it is made of."""
    if isinstance(value, list | tuple):
        for part in value:
            yield from walked(part)
    elif isinstance(value, dict):
        yield from walked(list(value.values()))
    elif isinstance(value, SimpleNamespace):
        yield from walked(vars(value))
    else:
        yield value


def storages_of(value: Any) -> list[Any]:
    """Of all tensors in a value, each once."""
    found = (v.storage for v in walked(value) if isinstance(v, Tensor))
    return list({id(storage): storage for storage in found}.values())


def shape_of(tensor: Tensor) -> str:
    return f"{list(tensor.shape)} {tensor.dtype.name}"


def place(line: int) -> str:
    return f" at {FILE}:{line}" if line else ""


# -- for the cases, as on virtual ranks --

LIMIT = 2.0
"""Seconds that a rank may run without a call."""


def on_ranks(size: int, program: Callable[..., Any], *args: Any) -> None:
    """Run `program(*args)` on so many ranks."""
    Ranks(size, LIMIT).run(program, *args)


def now() -> float:
    """The virtual clock of the rank that runs."""
    return float(ENGINE[-1].current.clock)


def advance(seconds: float) -> None:
    """Let the rank that runs compute for virtual seconds."""
    ENGINE[-1].current.clock += seconds


def kept(form: Any, source: str = "") -> Any:
    """A function of a file: calls of it that have returned are not made again.

    Not so where a call may depend on the calls before it.
    """
    if isinstance(form, type) or hasattr(form, "__wrapped__") or keeps_state(source):
        return form

    @functools.wraps(form)
    def called(*args: Any, **kwargs: Any) -> Any:
        return ENGINE[-1].once(form, args, kwargs)

    return called


def prepared(source: str) -> CodeType:
    """A file's code, whose endless loops end."""
    code = compile(source, FILE, "exec")
    watch(code)
    return code


@functools.lru_cache(maxsize=8)
def keeps_state(source: str) -> bool:
    """May a call of one of a file's functions depend on the calls before it?"""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Global):
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            return True
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
            return True
        if isinstance(node, ast.FunctionDef) and not all(
            isinstance(default, ast.Constant | ast.UnaryOp | ast.Attribute | None)
            for default in (*node.args.defaults, *node.args.kw_defaults)
        ):
            return True
    bound = (n for n in tree.body if isinstance(n, ast.Assign | ast.AnnAssign))
    return any(not isinstance(node.value, ast.Constant) for node in bound)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Of a check without ranks: it ends, too."""
    try:
        with deadline(2 * LIMIT), contextlib.redirect_stdout(Printed()):
            yield
    except TooLong as stopped:
        raise too_long(stopped, "the file ran for", 2 * LIMIT) from None


def too_long(stopped: TooLong, who: str, seconds: float, rank: int = 0) -> RankTimeout:
    """Of what runs without a call: where it was."""
    text = "".join(traceback.format_exception(stopped))
    report = RankReport(rank, "waiting", "running", text)
    return RankTimeout(f"{who} {seconds} s", [report], report)
