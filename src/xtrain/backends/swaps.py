"""Calls that ranks make in another order each: noticed, after they were made.

    rank 0   all_reduce(a)  # line 1     all_reduce(b)  # line 2
    rank 1   all_reduce(b)  # line 2     all_reduce(a)  # line 1

Where shapes and dtypes are equal the ranks can compare nothing but the lines, and those
may differ: one call is often written twice, `if rank == 0: ... else: ...`. But then no
rank ever comes to the other's line. A line that two ranks run, though never in the same
call, is worth a warning. It cannot be an error: a program may have ranks take turns.
"""

import logging

from xtrain.backends.calls import CollectiveCall

swap_log = logging.getLogger(__name__)
MAX_CALLS = 4096  # remembered; a program makes the same calls again and again


class SwapDetector:
    """What the ranks of a group ran while others ran another line."""

    def __init__(self, rank: int):
        self._rank = rank
        self._mine: dict[tuple[int, int], CollectiveCall] = {}
        self._warned: set[int] = set()

    def note(self, call: CollectiveCall, checks: list[int]) -> None:
        """Remember a call whose `checks`, all ranks' fingerprints, differ in lines.

        Warns, once for each line, when another rank now runs what this rank ran before.
        """
        mine = checks[self._rank]
        for peer, check in enumerate(checks):
            if check == mine:
                continue
            earlier = self._mine.get((peer, check))
            if earlier is not None and check not in self._warned:
                self._warned.add(check)
                swap_log.warning(
                    "Are these calls swapped? This rank ran\n  %s\nwhile another rank "
                    "was elsewhere; now that rank runs it, and this one\n  %s\nTensors "
                    "that do not belong together were combined. XTRAIN_COMPARE_LINES=1 "
                    "makes this an error before any data moves.",
                    earlier, call,
                )  # fmt: skip
            if len(self._mine) >= MAX_CALLS:
                self._mine.clear()
            self._mine[peer, mine] = call._replace(
                extra_text=None
            )  # it may hold tensors
