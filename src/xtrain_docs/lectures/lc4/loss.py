"""Tables and the picture of the vocabulary-parallel loss."""

import math
from collections.abc import Sequence
from typing import Any

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import cell, document, fit, text
from ...tables import REGISTRY as TABLES
from ...tables import Table

WIDTH, EDGE, LEFT, CELL, WIDE = 400, 394, 54, 50, 70
LOGITS = ((1.0, 2.0, 0.0, 3.0), (4.0, 0.0, 1.0, 0.0))
LABELS = (2, 0)


def loss_bytes(gathered: bool, tokens: int, vocabulary: int, ranks: int) -> int:
    """What the loss of fp32 logits keeps for backward: see the page."""
    if gathered:  # log-probabilities, labels, and a sum of weights
        return 4 * tokens * vocabulary + 8 * tokens + 4
    # probabilities, label's column, two masks, log-sum-exp, and the number of labels
    return 4 * tokens * vocabulary // ranks + (8 + 1 + 1 + 4) * tokens + 8


@TABLES
def loss_memory(tokens: int = 96, vocabulary: int = 4800) -> Table:
    """Bytes kept for backward by the parallel loss and by one of gathered logits."""
    from .runs_activations import kept_by_loss

    rows = []
    for ranks in (1, 2, 3, 4):
        cells = []
        for gathered in (True, False):
            formula = loss_bytes(gathered, tokens, vocabulary, ranks)
            for found in runs.remembered(
                kept_by_loss, ranks, gathered, tokens, vocabulary
            ):
                if found["bytes"] != formula or found["in place"] is gathered:
                    raise EvidenceError(f"gathered={gathered}: {found}, not {formula}")
            cells.append(formula)
        rows.append([str(ranks), *map(count, cells), f"{cells[0] / cells[1]:.2f}"])
    header = ["ranks", "gathered logits", "vocabulary-parallel", "ratio"]
    return Table(header, rows, "rrrr")


@TABLES
def large_logits(ranks: int = 4) -> Table:
    """The loss of small and large logits; EvidenceError unless ours is right."""
    from .runs_numbers import big_logits

    rows = []
    for scale in (1, 60):
        for first in (False, True):
            found = runs.remembered(big_logits, ranks, scale, first)
            for right, ours, _ in found:
                if abs(right - ours) > 1e-6 * right:
                    raise EvidenceError(f"x{scale}: {ours}, in one process {right}")
            right, ours, naive = found[0]
            where = "all in rank 0's part" if first else "anywhere"
            numbers = (f"{number:.4f}" for number in (right, ours, naive))
            rows.append([f"times {scale}", where, *numbers])
    header = ["logits", "labels", "one process", "ours", "without the maximum"]
    return Table(header, rows, "llrrr")


@FIGURES
def loss_steps(ranks: int = 2) -> str:
    """The numbers of each all-reduce of the loss, token by token."""
    from .runs_numbers import loss_parts

    found = runs.remembered(
        loss_parts, ranks, [list(row) for row in LOGITS], list(LABELS)
    )
    return loss_chart(found)


def loss_chart(found: list[dict[str, Any]]) -> str:
    """What `loss_parts` gives by rank; EvidenceError unless the losses are right."""
    for token, (row, label) in enumerate(zip(LOGITS, LABELS, strict=True)):
        loss = math.log(sum(map(math.exp, row))) - row[label]
        if any(abs(held["losses"][token] - loss) > 1e-12 for held in found):
            raise EvidenceError(f"token {token}: the loss is {loss}, not {found}")
    at = LEFT + len(found[0]["logits"][0]) * CELL + 12
    parts, words, y = [text(LEFT, 18, "logits", "xt-label")], [], 28.0
    for column, head in enumerate(("largest", "sum of exp", "label's")):
        parts.append(text(at + WIDE * column + 32, 18, head, "xt-label", "middle"))
    for token, label in enumerate(LABELS):
        for rank, held in enumerate(found):
            parts.append(text(6, y + 16.5, f"rank {rank}", "xt-tick"))
            for place, logit in enumerate(held["logits"][token]):
                x = LEFT + place * CELL
                parts += cell(x, y, CELL - 4, 24, rank, f"{logit:g}")
            parts += numbers(at, y, rank, sums_of(held, token, 0))
            y += 28
        shown = sums_of(found[0], token, 1)
        parts.append(text(6, y + 16.5, f"all ranks; label {label}", "xt-tick"))
        parts += numbers(at, y, None, shown)
        loss = found[0]["losses"][token]
        equation = f"log {shown[1]:.3f} - ({shown[2]:g}) = {loss:.3f}"
        parts.append(text(EDGE, y + 42, f"loss = {equation}", "xt-value-text", "end"))
        words.append(f"token {token}: the loss is {equation}")
        y += 60
    title = "The three numbers of each token's loss"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def numbers(x: float, y: float, rank: int | None, sums: Sequence[float]) -> list[str]:
    """A cell for each of the three, of one rank or of all."""
    parts = []
    for place, number in enumerate(sums):
        words = f"{round(number, 3):g}"
        parts += cell(x + WIDE * place, y, WIDE - 6, 24, rank, words)
    return parts


def sums_of(held: dict[str, Any], token: int, after: int) -> tuple[float, float, float]:
    """A rank's largest logit, sum of exp and label's logit, before or after the sum."""
    largest, sums = (call[after] for call in held["calls"])
    return largest[token], sums[0][token], sums[1][token]
