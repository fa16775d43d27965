"""Timelines and a table of the page on overlap."""

from collections.abc import Sequence
from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import TimeAxis, document, fit, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table

Span = list[Any]
WIDTH, LEFT, HIGH = 400, 84, 58
TOKENS, FEATURES = 512, 1024
# where a span lies in its row, how high it is, its colour and how opaque it is
LANES = {
    "matmul": (0, 20, 2, 0.4),
    "message": (24, 8, 0, 1.0),
    "wait": (36, 8, 1, 1.0),
}
KEYS = {"matmul": "matmul", "message": "message under way", "wait": "rank waits"}


def of(spans: Sequence[Span], what: str) -> list[tuple[float, float]]:
    return [(begin, end) for name, begin, end in spans if name == what]


def check_backward(spans: Sequence[Span], overlap: bool) -> None:
    """EvidenceError unless dX is summed under dW's matmul, or before it."""
    matmuls, (message,), (wait,) = (of(spans, what) for what in LANES)
    if len(matmuls) != 2:
        raise EvidenceError(f"{len(matmuls)} matmuls, not dX and dW")
    (_, dx_ends), (dw_begins, dw_ends) = matmuls
    under = dx_ends <= message[0] <= dw_begins and dw_ends <= wait[0]
    before = dx_ends <= message[0] and wait[1] <= dw_begins
    if not (under if overlap else before):
        raise EvidenceError(f"overlap={overlap}, but {list(spans)}")


def check_ring(spans: Sequence[Span], ranks: int) -> None:
    """EvidenceError unless each piece is multiplied while the next one travels."""
    matmuls, messages, waits = (of(spans, what) for what in LANES)
    if [len(matmuls), len(messages), len(waits)] != [ranks, ranks - 1, ranks - 1]:
        raise EvidenceError(f"not {ranks} pieces: {list(spans)}")
    steps = zip(matmuls[:-1], messages, waits, matmuls[1:], strict=True)
    for step, (matmul, message, wait, following) in enumerate(steps):
        times = [message[0], *matmul, *wait, following[0]]
        if times != sorted(times):
            raise EvidenceError(f"step {step} of the ring is in another order: {times}")


@FIGURES
def dx_under_dw(ranks: int = 2) -> str:
    """A column layer's backward by rank 0's clock, without and with overlap."""
    from .runs_overlap import column_backward_by_the_clock

    rows = {}
    for overlap in (False, True):
        arguments = (column_backward_by_the_clock, ranks, overlap, TOKENS, FEATURES)
        spans = runs.remembered(*arguments)[0]
        check_backward(spans, overlap)
        rows[f"{overlap}"] = spans
    words = (
        "Without overlap the rank waits for the sum of dX before it computes dW; with "
        "overlap dW is computed while the sum travels."
    )
    return chart(rows, ["dX", "dW"], "Backward of a column layer", words)


@FIGURES
def gather_in_pieces(ranks: int = 4) -> str:
    """A sequence-parallel column layer's forward by rank 0's clock: both forms."""
    from .runs_overlap import column_forward_by_the_clock

    rows = {}
    for name, overlap in (("True", True), ("ring", "ring")):
        arguments = (column_forward_by_the_clock, ranks, overlap, TOKENS, FEATURES)
        rows[name] = runs.remembered(*arguments)[0]
    check_ring(rows["ring"], ranks)
    words = (
        "The plain form waits for the whole all-gather and then multiplies once. The "
        f"ring multiplies {ranks} pieces, and each but the last while the next arrives."
    )
    owners = [str(-step % ranks) for step in range(ranks)]
    return chart(rows, owners, "Forward of a column layer", words)


def chart(
    rows: dict[str, Sequence[Span]], names: Sequence[str], title: str, words: str
) -> str:
    """A row for each form, over the same time; `names` are written into matmuls."""
    axis = TimeAxis(max(end for spans in rows.values() for *_, end in spans), LEFT)
    parts, x = [], 6
    for what, key in KEYS.items():
        _, _, colour, opacity = LANES[what]
        parts.append(rect(x, 6, 18, 9, colour, opacity=opacity, radius=2, hover=key))
        parts.append(text(x + 24, 15, key, "xt-tick"))
        x += 44 + 7 * len(key)
    for row, (name, spans) in enumerate(rows.items()):
        top = 36 + row * HIGH
        parts.append(text(6, top + 14, "overlap", "xt-tick"))
        parts.append(text(6, top + 30, f"= {name}", "xt-tick"))
        for what, begin, end in spans:
            low, high, colour, opacity = LANES[what]
            y, said = top + low, KEYS[what]
            parts.append(axis.bar(said, begin, end, y, high, colour, opacity))
        parts += inside(axis, of(spans, "matmul"), names, top + 14)
    bottom = 36 + HIGH * len(rows)
    parts += [axis.base(bottom), *axis.ends(bottom + 15)]
    return fit(document(WIDTH, bottom + 22, parts, title, words), WIDTH)


def inside(
    axis: TimeAxis,
    matmuls: Sequence[tuple[float, float]],
    names: Sequence[str],
    y: float,
) -> list[str]:
    """The names of the matmuls, where there is room; none if they are others."""
    if len(matmuls) != len(names):
        return []
    return [
        text(axis.at((begin + end) / 2), y, name, "xt-label", "middle")
        for (begin, end), name in zip(matmuls, names, strict=True)
        if axis.at(end) - axis.at(begin) > 8 * len(name)
    ]


def rounding_of_sums(ranks: int, inner: int = 8192, each_hop: bool = True) -> float:
    """Relative error (RMS) of a product whose inner dim is cut and summed in bf16.

    Args:
        each_hop: the sum is rounded on every rank it passes; else once, at the end.
    """
    import torch

    draw = torch.Generator().manual_seed(0)
    x_TI = torch.randn(64, inner, generator=draw).bfloat16().double()
    w_IO = torch.randn(inner, 64, generator=draw).bfloat16().double()
    parts = [
        (x @ w).bfloat16()
        for x, w in zip(x_TI.chunk(ranks, 1), w_IO.chunk(ranks, 0), strict=True)
    ]
    total = parts[0].double()
    for part in parts[1:]:
        total = total + part.double()
        if each_hop:
            total = total.bfloat16().double()
    exact = x_TI @ w_IO
    error = total.bfloat16().double() - exact
    return float(error.square().mean().sqrt() / exact.square().mean().sqrt())


@TABLES
def rounded_sums(ranks: tuple[int, ...] = (1, 2, 4, 8, 16)) -> Table:
    """Errors of 16-bit sums of partial results, by the number of ranks."""
    rows = [
        [str(n), f"{100 * rounding_of_sums(n):.2f} %",
         f"{100 * rounding_of_sums(n, each_hop=False):.2f} %"]
        for n in ranks
    ]  # fmt: skip
    header = ["ranks", "rounded on every rank it passes", "added in fp32, rounded once"]
    return Table(header, rows, "rrr")


@TABLES
def overlap_sends(ranks: int = 4, tokens: int = 64, features: int = 32) -> Table:
    """Bytes, messages and matmuls of both layers, as one call and as a ring."""
    from .runs_overlap import sent_by_layers

    whole, ring = (
        runs.remembered(sent_by_layers, ranks, overlap, tokens, features)[0]
        for overlap in (True, "ring")
    )
    one = tokens * features * runs.ITEMSIZE * (ranks - 1) // ranks
    formulas = {"column, forward": 1, "column, backward": 2, "row, forward": 1,
                "row, backward": 1}  # fmt: skip
    rows = []
    for (name, times), plain, pieces in zip(formulas.items(), whole, ring, strict=True):
        for found in (plain, pieces):
            if found[0] != times * one:
                raise EvidenceError(f"{name} sends {found[0]}, not {times * one}")
        cells = (name, times * one, plain[0], pieces[0], plain[2], pieces[2])
        rows.append([str(cell) for cell in cells])
    header = ["", "formula, bytes", "one call sends", "the ring sends",
              "matmuls, one call", "matmuls, ring"]  # fmt: skip
    return Table(header, rows, "lrrrrr")
