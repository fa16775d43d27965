"""The picture of samples that are dealt to ranks, with padding and with dropping."""

from collections.abc import Sequence

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY
from ...svg import document, fit, text
from .drawing import WIDTH, Box, boxed


@REGISTRY
def dealt_samples(length: int = 10, ranks: int = 4) -> str:
    """Which rank gets which sample, with padding and with dropping."""
    from .runs_figures import dealt

    padded = runs.remembered(dealt, ranks, length, False)
    dropped = runs.remembered(dealt, ranks, length, True)
    return deal_chart(padded, dropped, length)


def deal_chart(padded: list[list[int]], dropped: list[list[int]], length: int) -> str:
    """Two panels: a sample below its place in the shuffled list, in its rank's row."""
    ranks = len(padded)
    order = in_turn(padded)[:length]
    if (
        sorted(order) != list(range(length))
        or in_turn(dropped) != order[: len(dropped) * len(dropped[0])]
    ):
        raise EvidenceError(f"dealt {padded} and {dropped}, not one permutation")
    parts, y = [], 0.0
    for name, given in (("padded", padded), ("drop_last", dropped)):
        drawn, y = deal_panel(name, in_turn(given), order, ranks, y)
        parts += drawn
    words = (
        f"shuffled: {order}; padded, by rank: {padded}; with drop_last, by rank: "
        f"{dropped}"
    )
    return fit(document(WIDTH, round(y), parts, "Samples dealt to ranks", words), WIDTH)


def in_turn(by_rank: Sequence[Sequence[int]]) -> list[int]:
    """The list that was dealt out: the first of each rank, the second of each, ..."""
    return [index for turn in zip(*by_rank, strict=True) for index in turn]


def deal_panel(
    name: str, given: list[int], order: list[int], ranks: int, y: float
) -> tuple[list[str], float]:
    """The list of the epoch, and below it a row for each rank; and where it ends."""
    left, length = 56, len(order)
    step = (WIDTH - left - 2) / max(length, len(given), -(-length // ranks) * ranks)
    parts = [text(2, y + 16, name, "xt-label")]
    y += 24
    parts.append(text(2, y + 17, "shuffled", "xt-tick"))
    for place in range(max(length, len(given))):
        x = left + step * place
        again, left_out = place >= length, place >= len(given)
        sample = given[place] if not left_out else order[place]
        rank = place % ranks
        empty = again or left_out
        hover = f"sample {sample}: " + ("left out" if left_out else f"to rank {rank}")
        box = Box(str(sample), None if empty else rank, hover)
        parts += boxed(box, x, y, step - 3, 24)
        if not left_out:
            row = y + 32 + 28 * rank
            hover += " once more" if again else ""
            parts += boxed(Box(str(sample), rank, hover), x, row, step - 3, 24)
    for rank in range(ranks):
        parts.append(text(2, y + 32 + 28 * rank + 17, f"rank {rank}", "xt-tick"))
    return parts, y + 32 + 28 * ranks + 12
