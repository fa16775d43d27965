"""What data-flow pictures are drawn with: boxes of a state, arrows between rows."""

from dataclasses import dataclass, field

from ...svg import line, rect, text

WIDTH, BOX, EDGE = 400, 110, 6
LEFT, RIGHT, MIDDLE = EDGE, WIDTH - EDGE - BOX, WIDTH / 2
COLOURS = {"replicated": 0, "split": 1, "partial": 3, "largest": 3}


@dataclass
class Canvas:
    """Rows from the top: values on the left, names in the middle, gradients right.

    Attributes:
        above: what stands above on the right: a "box", a "line" of a gradient that
            goes by, or "none".
    """

    ranks: int
    y: float = 34.0
    parts: list[str] = field(default_factory=list)
    words: list[str] = field(default_factory=list)
    joined: bool = False
    above: str = "box"

    def __post_init__(self) -> None:
        self.parts += [
            text(LEFT, 18, "↓ forward", "xt-label"),
            text(MIDDLE, 18, f"on {self.ranks} ranks", "xt-tick", "middle"),
            text(RIGHT + BOX, 18, "backward ↑", "xt-label", "end"),
        ]

    def box(self, x: float, high: float, state: str) -> None:
        """Whole if replicated, cut if split, with a dashed edge if partial."""
        kind = state.split()[0]
        parts = self.ranks if kind == "split" else 1
        wide = (BOX - 3 * (parts - 1)) / parts
        colour = COLOURS[kind]
        for part in range(parts):
            at = x + part * (wide + 3)
            self.parts.append(rect(at, self.y, wide, high, colour, opacity=0.22,
                                   radius=4))  # fmt: skip
        if kind in ("partial", "largest"):
            self.parts.append(
                f'<rect x="{x + 1}" y="{self.y + 1:g}" width="{BOX - 2}" '
                f'height="{high - 2:g}" rx="4" class="xt-axis" fill="none" '
                'stroke-dasharray="4 3" stroke-width="1.5"/>'
            )

    def arrows(self, high: float, down: bool = True) -> None:
        """From the row above, down on the left, and up on the right."""
        if not self.joined:
            return
        left, right = LEFT + BOX / 2, RIGHT + BOX / 2
        bottom = self.y + high
        self.parts.append(line(left, self.y, left, bottom, "xt-axis"))
        if down:
            self.parts.append(head(left, bottom - 1, bottom - 7))
        if self.above != "none":
            self.parts.append(line(right, self.y, right, bottom, "xt-axis"))
        if self.above == "box":
            self.parts.append(head(right, self.y + 1, self.y + 7))
        self.y = bottom

    def passing(self, high: float) -> None:
        """The line of a gradient that goes by what has none."""
        if self.above == "line":
            x = RIGHT + BOX / 2
            self.parts.append(line(x, self.y, x, self.y + high, "xt-axis"))


def head(x: float, tip: float, back: float) -> str:
    """The head of an arrow."""
    corners = f"{x - 4:g},{back:g} {x + 4:g},{back:g} {x:g},{tip:g}"
    return f'<polygon points="{corners}" fill="currentColor" fill-opacity="0.6"/>'
