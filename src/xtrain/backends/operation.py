"""Operations of a group: generators that yield wherever they would have to wait."""

import contextlib
import time
from collections.abc import Callable, Generator
from typing import Any

Steps = Generator[None, None, None]
ENDED = object()


def interleave(parts: list[Steps]) -> Steps:
    """Advance all parts in turn until all have ended."""
    while parts:
        parts = [part for part in parts if next(part, ENDED) is not ENDED]
        if parts:
            yield


class Operation:
    """One posted operation: `done` when its steps have ended, well or with `error`.

    Args:
        call: describes it in errors.
        peers: the ranks it needs; None for all of them.
        opts: torch's options of the call, which may hold a timeout of its own.
    """

    __slots__ = (
        "call", "done", "error", "on_end", "opts", "peers", "started", "steps",
    )  # fmt: skip

    def __init__(
        self,
        call: object,
        steps: Steps,
        peers: tuple[int, ...] | None = None,
        opts: Any = None,
    ):
        self.call, self.steps, self.peers, self.opts = call, steps, peers, opts
        self.on_end: list[Callable[[], None]] = []
        self.started = time.monotonic()
        self.done = False
        self.error: BaseException | None = None

    def advance(self) -> bool:
        """Run to the next wait; True when the operation has ended."""
        try:
            next(self.steps)
        except StopIteration:
            self._end(None)
        except Exception as error:
            self._end(error)
        except BaseException as error:  # Ctrl-C: these steps will not be finished
            self._end(error)
            raise
        return self.done

    def waited(self) -> float:
        """Seconds since it could begin."""
        return time.monotonic() - self.started

    def own_timeout(self) -> float | None:
        """The seconds that this call was given; None where it was given none."""
        timeout = getattr(self.opts, "timeout", None)
        seconds = -1.0 if timeout is None else timeout.total_seconds()
        return seconds if seconds > 0 else None  # torch's "unset" is negative

    def fail(self, error: BaseException) -> None:
        """End it with `error`, wherever it is."""
        if not self.done:
            # Its steps may be running, below a signal handler that ends the group.
            with contextlib.suppress(ValueError):
                self.steps.close()
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self.done:
            return
        self.error, self.done = error, True
        for callback in self.on_end:
            callback()
