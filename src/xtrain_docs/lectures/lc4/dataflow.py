"""The data-flow picture of a module: what each tensor is, forward and backward."""

from typing import Any

from ... import runs
from ...figures import REGISTRY
from ...svg import document, fit, rect, text
from .dataflow_canvas import BOX, EDGE, LEFT, MIDDLE, RIGHT, WIDTH, Canvas

PAIRS = {
    ("", "all-reduce"): ("f", "identity_all_reduce"),
    ("all-reduce", ""): ("g", "all_reduce_identity"),
    ("all-gather", "reduce-scatter"): (
        "f of the sequence",
        "all_gather_reduce_scatter",
    ),
    ("reduce-scatter", "all-gather"): (
        "g of the sequence",
        "reduce_scatter_all_gather",
    ),
    ("all-gather", ""): ("gather", "all_gather_split"),
    ("", "all-gather"): ("split", "split_all_gather"),
}
"""What runs forward and backward, and the function of `comm.autograd` that does so."""


@REGISTRY
def data_flow(module: str = "swiglu", ranks: int = 2) -> str:
    """What is replicated, split and partial on the way through a module.

    Args:
        module: column_linear, row_linear, vocab_parallel_embedding,
            hidden_parallel_embedding, cross_entropy, swiglu, attention, decoder_layer,
            decoder_layer_sequence_parallel.
        ranks: of the tensor group. With 4, two ranks share a key head of attention.
    """
    from .runs_dataflow import data_flow as run

    found = runs.remembered(run, ranks, module)
    return flow_chart(found[0], module)


def flow_chart(found: dict[str, Any], module: str) -> str:
    """Draw what `runs_dataflow.data_flow` gives."""
    drawing = Drawing(found["ranks"])
    for row in found["rows"]:
        getattr(drawing, row["kind"])(row)
    if found["weights"]:
        drawing.weights(found["weights"])
    title = f"Data flow of {module.replace('_', ' ')} on {found['ranks']} ranks"
    words = "; ".join(drawing.words)
    chart = document(WIDTH, int(drawing.y), drawing.parts, title, words)
    return fit(chart, WIDTH)


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


class Drawing(Canvas):
    """The rows of a picture, from the top."""

    def tensor(self, row: dict[str, Any]) -> None:
        """A box with the state of the value, and one with that of the gradient."""
        if not row.get("beside"):
            self.arrows(14)
        elif self.joined:
            self.y += 6
        letters, states = row["letters"], (row["forward"], row["backward"])
        for x, state in zip((LEFT, RIGHT), states, strict=True):
            if state is None:
                continue
            self.box(x, 38, state)
            middle = x + BOX / 2
            shape = local_shape(letters, state, self.ranks)
            words = words_of(letters, state)
            self.parts += [
                text(middle, self.y + 16, words, "xt-label", "middle"),
                text(middle, self.y + 31, shape, "xt-tick", "middle"),
            ]
        whole = f"[{', '.join(letters.split())}]"
        self.parts += [
            text(MIDDLE, self.y + 16, row["name"], "xt-value-text", "middle"),
            text(MIDDLE, self.y + 31, whole, "xt-tick", "middle"),
        ]
        said = [words_of(letters, state) for state in states if state]
        self.words.append(f"{row['name']} is {', its gradient '.join(said)}")
        if row["backward"]:
            self.above = "box"
        else:
            self.above = "none" if not self.joined else "line"
            self.passing(38)
        self.y += 38
        self.joined = True

    def product(self, row: dict[str, Any]) -> None:
        """The names of the weights of a matmul."""
        names = [short(name).rpartition(".")[2] for name in row["weights"]]
        at, product = self.y + 19, f"× {', '.join(names)}"
        self.parts.append(text(MIDDLE, at, product, "xt-tick", "middle"))
        self.arrows(16, down=False)
        self.above = "line"
        self.words.append(f"multiplied with {', '.join(names)}")

    def band(self, row: dict[str, Any]) -> None:
        """Communication: forward on the left, backward on the right."""
        pair = (row["forward"], row["backward"])
        symbol, function = PAIRS.get(pair, ("", "")) if row["function"] else ("", "")
        self.arrows(14)
        high = 52 if row["again"] else 38
        wide = WIDTH - 2 * EDGE
        self.parts.append(rect(LEFT, self.y, wide, high, 2, opacity=0.2, radius=8))
        middle = self.y + high / 2
        for x, kind in zip((LEFT, RIGHT), pair, strict=True):
            quiet = "nothing sent" if row["function"] else ""
            style = "xt-value-text" if kind else "xt-tick"
            up = 7 if row["again"] and x == RIGHT else 0
            at = middle + 4.5 - up
            self.parts.append(text(x + BOX / 2, at, kind or quiet, style, "middle"))
        if row["again"]:
            again = f"+ {row['again']}"
            at = middle + 14
            self.parts.append(text(RIGHT + BOX / 2, at, again, "xt-tick", "middle"))
        if symbol:
            self.parts += [
                text(MIDDLE, middle - 3, symbol, "xt-value-text", "middle"),
                text(MIDDLE, middle + 12, function, "xt-tick", "middle"),
            ]
        ahead, back = (kind or "nothing sent" for kind in pair)
        name = symbol or "communication"
        self.words.append(f"{name}: {ahead} forward, {back} backward")
        self.above = "box" if row["function"] else "line"
        self.passing(high)
        self.y += high

    def weights(self, rows: list[dict[str, Any]]) -> None:
        """Every parameter in a line: what a rank holds, and what its gradient is."""
        self.y += 24
        self.parts += [
            text(LEFT, self.y, "weight", "xt-label"),
            text(RIGHT + BOX, self.y, "its gradient", "xt-label", "end"),
        ]
        if any(row["before_sum"] for row in rows):
            summed = "Σ: summed over ranks"
            self.parts.append(text(MIDDLE, self.y, summed, "xt-tick", "middle"))
        self.y += 8
        for row in rows:
            letters = row["letters"]
            for x, key in ((LEFT, "value"), (RIGHT, "grad")):
                self.box(x, 22, row[key])
                words = local_shape(letters, row[key], self.ranks)
                if key == "grad" and row["before_sum"]:
                    words += " Σ"
                middle = x + BOX / 2
                self.parts.append(text(middle, self.y + 15, words, "xt-tick", "middle"))
            name = short(row["name"])
            self.parts.append(text(MIDDLE, self.y + 15, name, "xt-tick", "middle"))
            said = words_of(letters, row["grad"])
            before = row["before_sum"]
            summed = f", {words_of(letters, before)} before a sum" if before else ""
            held = words_of(letters, row["value"])
            self.words.append(f"{name} is {held}, its gradient {said}{summed}")
            self.y += 26


def short(name: str) -> str:
    """`mlp.up_proj.weight` as `mlp.up_proj`."""
    return name.removesuffix(".weight")
