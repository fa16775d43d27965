"""Autograd's gradient of top-k, and of gates that are made of it."""

from typing import Any

import torch

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    logits = randn(12, 8, seed=rank).requires_grad_()
    grad = randn(12, 3, seed=9)
    values, experts = logits.sigmoid().topk(3)
    values.backward(grad)
    with Sent() as sent:
        dscores = form(grad, experts, 8)
    scores = logits.detach().sigmoid()
    dlogits = dscores * scores * (1 - scores)
    same("the gradient of sigmoid and top-k", dlogits, gradient(logits))
    zeros = dscores.eq(0).sum(-1)
    same("zero for the five others", zeros, torch.full_like(zeros, 5))

    logits.grad = None
    probabilities = logits.softmax(-1)
    probabilities.gather(1, experts).backward(grad)
    p = probabilities.detach()
    dlogits = p * (dscores - (dscores * p).sum(-1, keepdim=True))
    same("with a softmax all logits get one", dlogits, gradient(logits))
    sends(sent, "nothing", 0)
