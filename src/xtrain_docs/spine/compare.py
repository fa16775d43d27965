"""Curves of a lecture's wrappers beside the curve of one process."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .. import runs
from ..runs import EvidenceError
from ..svg import Axis, Frame, document, line, text
from ..tables import Table
from .reference import RANKS, Curve, difference, reference

EXACT, ROUNDED = 1e-12, 0.2
"""How far a curve may be from the reference: in float64, and with 16-bit numbers."""
WIDTH, HEIGHT, LEFT, BOTTOM = 400, 300, 40, 44
SIGNS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


@dataclass(frozen=True)
class Row:
    """One wrapper of a lecture.

    Attributes:
        name: as figure and table call it.
        function, arguments: what runs on every rank and gives a curve.
        ranks: world sizes on which it can run.
        right: gives the curve of one process that it has to reproduce.
    """

    name: str
    function: Callable[..., Curve]
    arguments: tuple[str, ...]
    ranks: tuple[int, ...] = RANKS
    right: Callable[[], Curve] = reference

    def curve(self, ranks: int) -> Curve:
        """Its curve on so many ranks, held against the reference."""
        found = runs.remembered(self.function, ranks, *self.arguments)
        return checked(found, self.right(), f"{self.name}, {ranks} ranks")


def checked(found: Sequence[Curve], right: Curve, name: str) -> Curve:
    """The curve of all ranks; EvidenceError if they differ, or it is not `right`."""
    exact = found[0]["exact"]
    if any(curve != found[0] for curve in found):
        raise EvidenceError(f"{name}: the ranks report different losses")
    limits = {"loss": EXACT, "norm": EXACT} if exact else {"loss": ROUNDED}
    for key, limit in limits.items():
        far = difference(found[0], right, key)
        if not far <= limit:
            raise EvidenceError(f"{name}: {key} differs by {far:.1e} from one process")
        if not exact and far <= EXACT:
            raise EvidenceError(f"{name}: nothing was rounded to 16 bits")
    return found[0]


def table_of(rows: Sequence[Row]) -> Table:
    """The largest difference of a step's loss, by wrapper and world size."""
    right = rows[0].right()
    cells = []
    for row in rows:
        curves = {ranks: row.curve(ranks) for ranks in row.ranks}
        losses = [
            power(difference(curves[n], right, "loss")) if n in curves else ""
            for n in RANKS
        ]
        norm = max(difference(curve, right, "norm") for curve in curves.values())
        cells.append([row.name, *losses, power(norm)])
    header = ["", *(f"loss, {ranks} ranks" for ranks in RANKS), "gradient norm"]
    return Table(header, cells, "l" + "r" * (len(RANKS) + 1))


def power(number: float) -> str:
    """2.5e-14 as `2.5 · 10⁻¹⁴`; above a thousandth as it is."""
    if number == 0 or number >= 1e-3:
        return f"{number:.2g}"
    digits, exponent = f"{number:.1e}".split("e")
    return f"{digits}\u00a0·\u00a010{str(int(exponent)).translate(SIGNS)}"


def figure_of(rows: Sequence[Row], ranks: int) -> str:
    """The reference as a line; of each wrapper every n-th step as a mark on it."""
    right: list[float] = rows[0].right()["loss"]
    curves = {row.name: row.curve(ranks)["loss"] for row in rows}
    return chart(right, curves, f"Loss of each step, one process and {ranks} ranks")


def chart(right: list[float], curves: dict[str, list[float]], title: str) -> str:
    """Marks of different wrappers are at different steps, so that none is hidden."""
    y = Axis("loss")
    highest = max(right + [loss for losses in curves.values() for loss in losses])
    key, top = legend(list(curves))
    ends, size = (0, len(right)), (WIDTH - LEFT - 10, HEIGHT - BOTTOM - top)
    frame = Frame(Axis("step"), y, ends, y.ends([0.0, highest]), LEFT, top, *size)
    px, py = frame.px, frame.py
    parts = [*key, text(6, top - 12, "loss", "xt-label"), *frame.axes()]
    parts.append(text(WIDTH - 10, HEIGHT - 6, "step", "xt-label", "end"))
    path = " ".join(f"{px(i):.1f},{py(v):.1f}" for i, v in enumerate(right, start=1))
    parts.append(f'<polyline points="{path}" class="xt-line xt-s7"/>')
    for index, (name, losses) in enumerate(curves.items()):
        for step in range(index, len(losses), len(curves)):
            hover = f"{name}, step {step + 1}: {losses[step]:.6f}"
            parts.append(mark(index, px(step + 1), py(losses[step]), hover))
    words = f"{', '.join(curves)} lie on the line of one process"
    return document(WIDTH, HEIGHT, parts, title, words)


def legend(names: list[str]) -> tuple[list[str], float]:
    """The line and the marks with their names, in rows; and where the rows end."""
    parts = [line(6, 10, 24, 10, "xt-line xt-s7"), text(30, 14, "one process", "")]
    x, y = 30 + 7.4 * len("one process") + 16, 14
    for index, name in enumerate(names):
        if x + 16 + 7.4 * len(name) > WIDTH:
            x, y = 6.0, y + 20
        parts += [mark(index, x + 6, y - 4), text(x + 18, y, name, "")]
        x += 34 + 7.4 * len(name)
    return parts, y + 34.0


def mark(index: int, x: float, y: float, hover: str = "") -> str:
    """A dot of a series: another shape for each, not only another colour."""
    r = 5.5
    corners: list[list[tuple[float, float]]] = [
        [],
        [(-r, -r), (r, -r), (r, r), (-r, r)],
        [(0, -r - 1), (r + 1, r), (-r - 1, r)],
        [(0, -r - 2), (r + 2, 0), (0, r + 2), (-r - 2, 0)],
        [(0, r + 1), (r + 1, -r), (-r - 1, -r)],
    ]
    title = f"<title>{hover}</title>" if hover else ""
    kind = f'class="xt-dot xt-s{index}"'
    shape = corners[index % len(corners)]
    if not shape:
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{r}" {kind}>{title}</circle>'
    points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in shape)
    return f'<polygon points="{points}" {kind}>{title}</polygon>'
