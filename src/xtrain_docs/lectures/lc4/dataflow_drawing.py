"""How a data-flow picture is drawn: boxes of a state, arrows between the rows."""

from ...figures import REGISTRY
from ...svg import document, line, rect, text
from .dataflow import Row, Weight, rows_of, weights_of

WIDTH, BOX, EDGE = 400, 110, 6
LEFT, RIGHT, MIDDLE, HALF = EDGE, WIDTH - EDGE - BOX, WIDTH / 2, BOX / 2
COLOURS = {"replicated": 0, "split": 1, "partial": 3, "largest": 3}
GATHER, SCATTER = "all-gather", "reduce-scatter"
PAIRS = {
    ("", "all-reduce"): ("f", "identity_all_reduce"),
    ("all-reduce", ""): ("g", "all_reduce_identity"),
    (GATHER, SCATTER): ("f of the sequence", "all_gather_reduce_scatter"),
    (SCATTER, GATHER): ("g of the sequence", "reduce_scatter_all_gather"),
    (GATHER, ""): ("gather", "all_gather_split"),
    ("", GATHER): ("split", "split_all_gather"),
}
"""What runs forward and backward, and the function of `comm.autograd` that does so."""


@REGISTRY
def data_flow(module: str = "swiglu", ranks: int = 2) -> str:
    """What is replicated, split and partial on the way through a module.

    Args:
        module: one of `dataflow.MODULES`.
        ranks: of the tensor group. With 4, two ranks share a key head of attention.
    """
    drawing = Drawing(ranks)
    for row in rows_of(module, ranks):
        getattr(drawing, row.kind)(row)
    if weights := weights_of(module, ranks):
        drawing.weights(weights)
    title = f"Data flow of {module.replace('_', ' ')} on {ranks} ranks"
    words = "; ".join(drawing.words)
    return document(WIDTH, drawing.y, drawing.parts, title, words)


def local_shape(letters: str, state: str, ranks: int) -> str:
    """The shape that one rank has: `split 2` of B S H on 2 ranks is [B, S, H/2]."""
    dims = letters.split()
    _, *rest = state.split()
    if not rest:
        return f"[{', '.join(dims)}]"
    dim, *by = rest
    copies = int(by[1]) if by else 1
    dims[int(dim)] += f"/{ranks // copies}"
    return f"[{','.join(dims)}] ×{copies}" if by else f"[{', '.join(dims)}]"


def words_of(letters: str, state: str) -> str:
    """`split 2` of B S H as "split: H"."""
    kind, *rest = state.split()
    if kind == "largest":
        return "own largest"
    return f"{kind}: {letters.split()[int(rest[0])]}" if rest else kind


class Drawing:
    """Rows from the top: values on the left, names in the middle, gradients right.

    Attributes:
        above: what stands above on the right: a "box", a "line" of a gradient that
            goes by, or "none".
    """

    def __init__(self, ranks: int) -> None:
        self.ranks, self.y, self.joined, self.above = ranks, 34.0, False, "box"
        self.words: list[str] = []
        self.parts = [
            text(LEFT, 18, "↓ forward", "xt-label"),
            text(MIDDLE, 18, f"on {ranks} ranks", "xt-tick", "middle"),
            text(RIGHT + BOX, 18, "backward ↑", "xt-label", "end"),
        ]

    def say(self, x: float, down: float, words: str, style: str = "xt-tick") -> None:
        """Words around x, so far below the top of the row."""
        self.parts.append(text(x, self.y + down, words, style, "middle"))

    def box(self, x: float, high: float, state: str) -> None:
        """Whole if replicated, cut if split, with a dashed edge if partial."""
        kind = state.split()[0]
        parts = self.ranks if kind == "split" else 1
        wide = (BOX - 3 * (parts - 1)) / parts
        for part in range(parts):
            at = x + part * (wide + 3)
            self.parts.append(rect(at, self.y, wide, high, COLOURS[kind], opacity=0.22,
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
        left, right, bottom = LEFT + HALF, RIGHT + HALF, self.y + high
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
            x = RIGHT + HALF
            self.parts.append(line(x, self.y, x, self.y + high, "xt-axis"))

    def tensor(self, row: Row) -> None:
        """A box with the state of the value, and one with that of the gradient."""
        if not row.beside:
            self.arrows(14)
        elif self.joined:
            self.y += 6
        letters, states = row.letters, (row.forward, row.backward)
        for x, state in zip((LEFT, RIGHT), states, strict=True):
            if state is not None:
                self.box(x, 38, state)
                self.say(x + HALF, 16, words_of(letters, state), "xt-label")
                self.say(x + HALF, 31, local_shape(letters, state, self.ranks))
        self.say(MIDDLE, 16, row.name, "xt-value-text")
        self.say(MIDDLE, 31, f"[{', '.join(letters.split())}]")
        said = [words_of(letters, state) for state in states if state]
        self.words.append(f"{row.name} is {', its gradient '.join(said)}")
        if row.backward:
            self.above = "box"
        else:
            self.above = "none" if not self.joined else "line"
            self.passing(38)
        self.y += 38
        self.joined = True

    def product(self, row: Row) -> None:
        """The names of the weights of a matmul."""
        names = ", ".join(short(name).rpartition(".")[2] for name in row.weights)
        self.say(MIDDLE, 19, f"× {names}")
        self.arrows(16, down=False)
        self.above = "line"
        self.words.append(f"multiplied with {names}")

    def band(self, row: Row) -> None:
        """Communication: forward on the left, backward on the right."""
        pair = (row.forward, row.backward or "")
        symbol, function = PAIRS.get(pair, ("", "")) if row.pair else ("", "")
        self.arrows(14)
        high = 52 if row.again else 38
        wide, middle = WIDTH - 2 * EDGE, high / 2
        self.parts.append(rect(LEFT, self.y, wide, high, 2, opacity=0.2, radius=8))
        for x, kind in zip((LEFT, RIGHT), pair, strict=True):
            words = kind or ("nothing sent" if row.pair else "")
            at = middle + 4.5 - (7 if row.again and x == RIGHT else 0)
            self.say(x + HALF, at, words, "xt-value-text" if kind else "xt-tick")
        if row.again:
            self.say(RIGHT + HALF, middle + 14, f"+ {row.again}")
        if symbol:
            self.say(MIDDLE, middle - 3, symbol, "xt-value-text")
            self.say(MIDDLE, middle + 12, function)
        ahead, back = (kind or "nothing sent" for kind in pair)
        name = symbol or "communication"
        self.words.append(f"{name}: {ahead} forward, {back} backward")
        self.above = "box" if row.pair else "line"
        self.passing(high)
        self.y += high

    def weights(self, rows: list[Weight]) -> None:
        """Every parameter in a line: what a rank holds, and what its gradient is."""
        self.y += 24
        self.parts += [
            text(LEFT, self.y, "weight", "xt-label"),
            text(RIGHT + BOX, self.y, "its gradient", "xt-label", "end"),
        ]
        if any(row.before_sum for row in rows):
            self.say(MIDDLE, 0, "Σ: summed over ranks")
        self.y += 8
        for row in rows:
            before, letters = row.before_sum, row.letters
            for x, state in ((LEFT, row.value), (RIGHT, row.grad)):
                self.box(x, 22, state)
                sign = " Σ" if before and x == RIGHT else ""
                self.say(x + HALF, 15, local_shape(letters, state, self.ranks) + sign)
            self.say(MIDDLE, 15, name := short(row.name))
            held, said = words_of(letters, row.value), words_of(letters, row.grad)
            summed = f", {words_of(letters, before)} before a sum" if before else ""
            self.words.append(f"{name} is {held}, its gradient {said}{summed}")
            self.y += 26


def head(x: float, tip: float, back: float) -> str:
    """The head of an arrow."""
    corners = f"{x - 4:g},{back:g} {x + 4:g},{back:g} {x:g},{tip:g}"
    return f'<polygon points="{corners}" fill="currentColor" fill-opacity="0.6"/>'


def short(name: str) -> str:
    """`mlp.up_proj.weight` as `mlp.up_proj`."""
    return name.removesuffix(".weight")
