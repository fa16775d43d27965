"""Autograd's gradient of top-k, and of gates that are made of it."""

import torch

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.expert_parallel.top_k_gradient import top_k_gradient


def check(rank: int, size: int) -> None:
    logits = randn(12, 8, seed=rank, dtype=torch.float64).requires_grad_()
    grad = randn(12, 3, seed=9, dtype=torch.float64)
    values, experts = logits.sigmoid().topk(3)
    values.backward(grad)
    with Sent() as sent:
        dscores = top_k_gradient(grad, experts, 8)
    scores = logits.detach().sigmoid()
    dlogits = dscores * scores * (1 - scores)
    same("the gradient of sigmoid and top-k", dlogits, gradient(logits), 1e-12)
    zeros = dscores.eq(0).sum(-1)
    same("zero for the five others", zeros, torch.full_like(zeros, 5))

    logits.grad = None
    probabilities = logits.softmax(-1)
    probabilities.gather(1, experts).backward(grad)
    p = probabilities.detach()
    dlogits = p * (dscores - (dscores * p).sum(-1, keepdim=True))
    same("with a softmax all logits get one", dlogits, gradient(logits), 1e-12)
    sends(sent, "nothing", 0)
