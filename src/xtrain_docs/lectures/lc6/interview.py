"""Tables of the questions of lc6: measured in small runs."""

from ... import runs
from ...evidence import EvidenceError
from ...tables import REGISTRY, Table
from ...values import percent


@REGISTRY
def order_of_messages(ranks: int = 4) -> Table:
    """Messages that a rank has posted before it computes each block of a ring."""
    from .runs_interview import posted_before_blocks

    found = runs.remembered(posted_before_blocks, ranks, 4)
    forward = [min(step + 1, ranks - 1) for step in range(ranks)] + [ranks - 1]
    rows = []
    for name, counts in zip(("forward", "backward"), found[0], strict=True):
        if any(one != found[0] for one in found) or found[0][0] != forward:
            raise EvidenceError(f"messages before the blocks: {found}")
        rows.append([name, *map(str, counts)])
    header = ["", *(f"before block {i}" for i in range(ranks)), "in the end"]
    return Table(header, rows, "l" + "r" * (ranks + 1))


@REGISTRY
def errors_of_model(ranks: int = 4, tokens: int = 32) -> Table:
    """Loss and gradients of a model on cut sequences, right and with one mistake."""
    from .runs_interview import CHANGES, error_of_model

    rows = []
    for change in CHANGES:
        found = runs.remembered(error_of_model, ranks, change, tokens)
        loss, gradient = (max(one[i] for one in found) for i in (0, 1))
        if (gradient < 1e-12) != (change == CHANGES[0]):
            raise EvidenceError(f"{change}: gradients are off by {gradient}")
        cells = ("none" if e < 1e-12 else percent(e) for e in (loss, gradient))
        rows.append([change, *cells])
    return Table(["mistake", "error of the loss", "of the gradients"], rows, "lrr")
