"""The page on the loss: the three numbers of each token."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.tensor_parallel import vocab_parallel_cross_entropy

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, text

WIDTH, EDGE, LEFT, CELL, WIDE, RANKS = 400, 394, 54, 50, 70, 2
LOGITS = ((1.0, 2.0, 0.0, 3.0), (4.0, 0.0, 1.0, 0.0))
LABELS = (2, 0)


def loss_parts() -> dict[str, Any]:
    """By token: this rank's logits, what it puts into the sums and gets, the loss."""
    whole = torch.tensor(LOGITS, dtype=torch.float64)
    local, calls = whole.chunk(RANKS, -1)[dist.get_rank()], []
    total = dist.all_reduce

    def spied(numbers: Tensor, *args: Any, **options: Any) -> None:
        before = numbers.clone()
        total(numbers, *args, **options)
        calls.append(torch.stack([before, numbers]).view(2, -1, len(LABELS)))

    with mock.patch.object(dist, "all_reduce", spied):
        losses = vocab_parallel_cross_entropy(
            local, torch.tensor(LABELS), reduction="none"
        )
    put, got = torch.cat(calls, 1).transpose(1, 2).tolist()  # largest, exp, label's
    return {"logits": local.tolist(), "put": put, "got": got, "loss": losses.tolist()}


@REGISTRY
def loss_steps() -> str:
    """The numbers of each all-reduce of the loss, token by token."""
    found = runs.remembered(loss_parts, RANKS)
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
            parts += numbers(at, y, rank, held["put"][token])
            y += 28
        shown, loss = found[0]["got"][token], found[0]["loss"][token]
        parts.append(text(6, y + 16.5, f"all ranks; label {label}", "xt-tick"))
        parts += numbers(at, y, None, shown)
        equation = f"log {shown[1]:.3f} - ({shown[2]:g}) = {loss:.3f}"
        parts.append(text(EDGE, y + 42, f"loss = {equation}", "xt-value-text", "end"))
        words.append(f"token {token}: the loss is {equation}")
        y += 60
    title = "The three numbers of each token's loss"
    return document(WIDTH, y, parts, title, "; ".join(words))


def numbers(x: float, y: float, rank: int | None, three: Sequence[float]) -> list[str]:
    """A cell for each of the three, of one rank or of all."""
    parts = []
    for place, number in enumerate(three):
        words = f"{round(number, 3):g}"
        parts += cell(x + WIDE * place, y, WIDE - 6, 24, rank, words)
    return parts
