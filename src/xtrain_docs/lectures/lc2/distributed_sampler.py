"""Samples that are dealt to ranks, with padding and with dropping."""

from xtrain.data_parallel import DistributedSampler

from ...figures import REGISTRY
from ...svg import document, text
from .boxes import WIDTH, Box, boxed

LEFT = 56


def dealt(length: int, ranks: int, drop_last: bool) -> list[int]:
    """The samples of epoch 0, in the order in which they are dealt out."""
    hands = [
        list(DistributedSampler(range(length), ranks, rank, drop_last=drop_last))
        for rank in range(ranks)
    ]
    return [sample for turn in zip(*hands, strict=True) for sample in turn]


@REGISTRY
def dealt_samples(length: int = 10, ranks: int = 4) -> str:
    """A sample below its place in the shuffled list, in its rank's row."""
    order = dealt(length, ranks, False)
    step = (WIDTH - LEFT - 2) / len(order)
    parts: list[str] = []
    told = []
    for panel, name in enumerate(("padded", "drop_last")):
        given = dealt(length, ranks, panel == 1)
        y = panel * (68 + 28 * ranks)
        parts.append(text(2, y + 16, name, "xt-label"))
        parts.append(text(2, y + 41, "shuffled", "xt-tick"))
        for rank in range(ranks):
            parts.append(text(2, y + 73 + 28 * rank, f"rank {rank}", "xt-tick"))
            told.append(f"{name}, rank {rank}: {given[rank::ranks]}")
        for place in range(max(length, len(given))):
            x, rank, sample = LEFT + step * place, place % ranks, order[place]
            again, left_out = place >= length, place >= len(given)
            hover = f"sample {sample}: "
            hover += "left out" if left_out else f"to rank {rank}"
            colour = None if again or left_out else rank
            parts += boxed(Box(str(sample), colour, hover), x, y + 24, step - 3, 24)
            if not left_out:
                hand = Box(str(sample), rank, hover + " once more" * again)
                parts += boxed(hand, x, y + 56 + 28 * rank, step - 3, 24)
    bottom = 2 * (68 + 28 * ranks)
    words = f"shuffled: {order[:length]}; {'; '.join(told)}"
    return document(WIDTH, bottom, parts, "Samples dealt to ranks", words)
