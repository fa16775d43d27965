"""The loss is torch's, the gradient a quarter of the columns of torch's."""

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.tensor_parallel.vocab_parallel_cross_entropy import (
    vocab_parallel_cross_entropy,
)


def check(rank: int, size: int) -> None:
    logits = randn(2, 5, 12, seed=1, dtype=torch.float64) * 500  # e^500 overflows
    labels = torch.tensor([[0, 2, 3, -100, 5], [6, 8, 9, 11, -100]])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    expected.backward()
    mine = logits.chunk(size, -1)[rank].clone().requires_grad_()
    with Sent() as sent:
        loss = vocab_parallel_cross_entropy(mine, labels)
        loss.backward()
    same("the loss of 8 tokens; 2 are ignored", loss, expected, 1e-12)
    part = gradient(whole).chunk(size, -1)[rank]
    same("a quarter of the gradient's columns", gradient(mine), part, 1e-12)
    nbytes = 3 * labels.numel() * 8
    formula = f"2(N-1)/N of {nbytes:,} bytes, three numbers a token"
    sends(sent, formula, 2 * (size - 1) / size * nbytes)
