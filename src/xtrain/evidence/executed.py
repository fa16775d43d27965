"""Which symbols a test really runs, in its own process and on its ranks.

    with watching(["xtrain.comm.ring:ring_all_reduce"]) as seen:
        world.run(reduce_on_every_rank)
    seen.places    {"xtrain.comm.ring:ring_all_reduce": {("gloo", 4)}}

A mark names what a test is about; only a test that has run the symbol is evidence for
it. A place is the backend and the number of ranks it ran on; none for this process
itself, so a formula that no rank computes has no backend. What holds no code that could
run (a constant) is taken by the mark alone.
"""

import ast
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from xtrain.evidence.source import definition, locate

Place = tuple[str, int]  # backend and number of ranks
Code = tuple[str, str]  # file, and name at its top level
Codes = dict[str, Code | None]  # symbols, each with the code that has to run


@dataclass(slots=True, eq=False)
class Seen:
    """What has run so far; `places` has a key for every symbol that did."""

    codes: Codes
    places: dict[str, set[Place]] = field(default_factory=dict)

    @property
    def symbols(self) -> tuple[str, ...]:
        """What is watched for."""
        return tuple(self.codes)

    def here(self, symbol: str) -> None:
        """It ran in this process."""
        self.places.setdefault(symbol, set())

    def on_ranks(self, symbols: Iterable[str], backend: str, size: int) -> None:
        """They ran on a rank of a World of `size`."""
        for symbol in symbols:
            self.places.setdefault(symbol, set()).add((backend, size))

    def missing(self, backend: str, size: int) -> Codes:
        """What no rank of such a World has run yet."""
        place, known = (backend, size), self.places
        return {s: c for s, c in self.codes.items() if place not in known.get(s, ())}


_now: list[Seen] = []
_stops: list[Callable[[], None]] = []  # what ends each watch that is open


def current() -> Seen | None:
    """What the running test is watched for."""
    return _now[-1] if _now else None


def watching(symbols: Iterable[str]) -> AbstractContextManager[Seen]:
    """Notice which of `symbols` this process runs, until the block ends."""
    return watching_code({symbol: code_of(symbol) for symbol in symbols})


@contextmanager
def watching_code(codes: Codes) -> Iterator[Seen]:
    """`watching`, with the code of the symbols given."""
    seen = Seen(codes)
    wanted: dict[Code, str] = {}
    for symbol, code in codes.items():
        if code is None:
            seen.here(symbol)
        else:
            wanted[code] = symbol
    _now.append(seen)
    stop = _watch(wanted, seen) if wanted else lambda: None
    _stops.append(stop)
    try:
        yield seen
    finally:
        stop()
        _stops.remove(stop)
        _now.remove(seen)


def forget() -> None:
    """End the watches that a forked process inherits: otherwise each of its calls would
    still be looked at."""
    while _stops:
        _stops.pop()()
    _now.clear()


@lru_cache(maxsize=4096)
def code_of(symbol: str) -> Code | None:
    """File and name of the code to watch for; None where no function stands in it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
    if not any(isinstance(node, functions) for node in ast.walk(definition(symbol))):
        return None
    path, name = locate(symbol)
    return str(path), name


def _watch(wanted: dict[Code, str], seen: Seen) -> Callable[[], None]:
    """Have the interpreter report calls; returns what ends that."""

    def notice(code: CodeType) -> str | None:
        top = code.co_qualname.partition(".")[0]
        symbol = wanted.get((code.co_filename, top))
        if symbol is not None:
            seen.here(symbol)
        return symbol

    if sys.version_info >= (3, 12):
        return _monitor(notice)
    return _profile(notice, lambda: seen.places.keys() >= seen.codes.keys())


def _monitor(notice: Callable[[CodeType], str | None]) -> Callable[[], None]:
    """Python 3.12: each piece of code reports once and is then left alone."""
    monitoring: Any = sys.monitoring  # type: ignore[attr-defined, unused-ignore]
    tool = next((n for n in (4, 3) if monitoring.get_tool(n) is None), None)
    if tool is None:  # a watch inside a watch inside a watch
        return lambda: None
    monitoring.use_tool_id(tool, "xtrain verifies")

    def started(code: CodeType, offset: int) -> Any:
        notice(code)
        return monitoring.DISABLE

    monitoring.register_callback(tool, monitoring.events.PY_START, started)
    monitoring.set_events(tool, monitoring.events.PY_START)
    monitoring.restart_events()

    def stop() -> None:
        monitoring.set_events(tool, 0)
        monitoring.free_tool_id(tool)

    return stop


def _profile(
    notice: Callable[[CodeType], object], all_seen: Callable[[], bool]
) -> Callable[[], None]:
    """Python 3.11: every call is looked at, until all symbols have been seen."""
    known: set[CodeType] = set()
    over = False
    before = sys.getprofile()

    def called(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal over
        if event == "call" and not over and frame.f_code not in known:
            known.add(frame.f_code)
            notice(frame.f_code)
            over = all_seen()
        if over:  # also in a thread that lives longer than the watch
            sys.setprofile(before)

    def stop() -> None:
        nonlocal over
        over = True
        if sys.getprofile() is called:
            sys.setprofile(before)
        threading.setprofile(before)

    threading.setprofile(called)
    sys.setprofile(called)
    return stop
