"""The picture of online softmax: how much each key weighs after each block."""

import torch

from xtrain.context_parallel import online_softmax

from ... import runs
from ...figures import REGISTRY
from ...svg import document, line, rect, text

SCORES = [[1.0, 0.0, 2.0], [3.0, 1.0, 2.0], [0.0, 4.0, 2.0]]
"""Of one query, in three blocks of keys; each brings a larger score."""
SIZE = 3
WIDTH, LEFT, GAP, HIGH = 400, 12, 14, 74
WIDE = (WIDTH - 2 * LEFT - (len(SCORES) - 1) * GAP) / (SIZE * len(SCORES))


def states() -> list[tuple[float, list[float]]]:
    """Log-sum-exp after each block, and how much each key weighs.

    Values are unit vectors, so an output is the weights.
    """
    scores = torch.tensor(SCORES, dtype=torch.float64).view(1, -1)
    keys = torch.eye(scores.shape[-1], dtype=torch.float64)
    found = []
    for seen in range(SIZE, scores.shape[-1] + 1, SIZE):
        output, lse = online_softmax(scores[:, :seen], keys[:seen], SIZE)
        found.append((lse.item(), output[0].tolist()))
    return found


@REGISTRY
def softmax_weights() -> str:
    """How much each key weighs after each block, a row of bars for each."""
    parts, words = [], []
    found = runs.remembered(states, 1)[0]
    for number, (lse, weights) in enumerate(found):
        floor = 54.0 + number * (HIGH + 58) + HIGH
        said = f"after block {number + 1}: lse {lse:.2f}"
        if number:
            share = sum(weights[: number * SIZE])
            said += f"; {share:.2f} before + {1 - share:.2f} block"
        parts.append(text(LEFT, floor - HIGH - 18, said, "xt-label"))
        for key, weight in enumerate(weights):
            block = key // SIZE
            x = LEFT + key * WIDE + block * GAP
            middle = x + WIDE / 2 - 2
            parts.append(line(x, floor, x + WIDE - 4, floor, "xt-axis"))
            if block > number:
                continue
            tall = HIGH * weight
            parts += [
                rect(x, floor - tall, WIDE - 4, tall, block),
                text(middle, floor - tall - 4, f"{weight:.2f}", "xt-tick", "middle"),
                text(middle, floor + 15, f"{SCORES[block][key % SIZE]:g}",
                     "xt-tick", "middle"),
            ]  # fmt: skip
        words.append(", ".join(f"{weight:.3f}" for weight in weights))
    title = "Weights of nine keys after each of three blocks"
    height = int(54 + len(found) * (HIGH + 58) - 30)
    return document(WIDTH, height, parts, title, "; ".join(words))
