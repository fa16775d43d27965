"""The loss is torch's, the gradient its part of the columns of torch's."""

from typing import Any

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    logits = randn(2, 5, 24, seed=1) * 500  # e^500 overflows
    labels = torch.tensor([[0, 2, 3, -100, 5], [6, 8, 9, 11, -100]])
    whole = logits.clone().requires_grad_()
    expected = F.cross_entropy(whole.flatten(0, 1), labels.flatten())
    expected.backward()
    mine = logits.chunk(size, -1)[rank].clone().requires_grad_()
    with Sent() as ahead:
        loss = form(mine, labels)
    with Sent() as back:
        loss.backward()
    same("the loss of 8 tokens; 2 are ignored", loss, expected)
    part = gradient(whole).chunk(size, -1)[rank]
    same("its part of the gradient's columns", gradient(mine), part)
    nbytes = 2 * (size - 1) / size * 3 * labels.numel() * logits.itemsize
    sends(ahead, "forward 2(N-1)/N of three numbers a token", nbytes)
    sends(back, "nothing backward", 0)
