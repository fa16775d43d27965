"""How far a test run is: a bar in a terminal, a line now and then elsewhere."""

from dataclasses import dataclass

WIDTH = 24
LINES = 20  # of a whole run, where there is no terminal


@dataclass(slots=True)
class ProgressBar:
    """Tests that ended, of all, and the time that is left.

    Attributes:
        expected: seconds that all tests were thought to take, before the first ended.
        limit: seconds after which no further test starts.
    """

    total: int
    expected: float
    limit: float
    done: int = 0
    failed: int = 0

    def left(self, elapsed: float) -> float:
        """Seconds: at first as thought, then more and more as measured."""
        if not self.total:
            return 0.0
        share = self.done / self.total
        thought = self.expected * (1 - share)
        measured = elapsed / share - elapsed if share else thought
        return min(share * measured + (1 - share) * thought, self.limit - elapsed)

    def text(self, elapsed: float) -> str:
        """`[######......] 812 of 3,633 tests, 1 failed, 14:05 left`."""
        filled = WIDTH * self.done // max(1, self.total)
        failed = f", {self.failed} failed" if self.failed else ""
        minutes, seconds = divmod(max(0, round(self.left(elapsed))), 60)
        return (
            f"[{'#' * filled}{'.' * (WIDTH - filled)}] {self.done:,} of {self.total:,} "
            f"tests{failed}, {minutes}:{seconds:02} left"
        )

    def is_due(self) -> bool:
        """Is it time for a line of its own?"""
        return self.done * LINES // self.total > (self.done - 1) * LINES // self.total
