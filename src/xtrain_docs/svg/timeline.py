"""What happened when, from left to right."""

from dataclasses import dataclass

from ..amounts import seconds
from .shapes import line, rect, text


@dataclass(frozen=True)
class TimeAxis:
    """Seconds from 0, which is at `left`, to `last`, near the right edge."""

    last: float
    left: float
    width: int = 400

    @property
    def right(self) -> float:
        """Where `last` is."""
        return self.width - 6

    def at(self, time: float) -> float:
        """Where a time is; what comes after the last one is at the edge."""
        return self.left + (self.right - self.left) * min(time / self.last, 1)

    def bar(
        self,
        what: str,
        begin: float,
        end: float,
        y: float,
        height: float,
        colour: int,
        opacity: float = 1.0,
        least: float = 1.5,
    ) -> str:
        """From `begin` to `end`, with its name and times as its title.

        Args:
            least: how wide it is at least, so that it can be seen.
        """
        wide = max(self.at(end) - self.at(begin), least)
        hover = f"{what}: {seconds(begin)} to {seconds(end)}"
        return rect(self.at(begin), y, wide, height, colour, opacity=opacity,
                    radius=2, hover=hover)  # fmt: skip

    def base(self, y: float) -> str:
        """The line below the rows."""
        return line(self.left, y, self.right, y, "xt-axis")

    def ends(self, y: float) -> list[str]:
        """The first and the last time below that line; `y` is that of the letters."""
        return [
            text(self.left, y, "0 ms", "xt-tick"),
            text(self.right, y, seconds(self.last), "xt-tick", "end"),
        ]
