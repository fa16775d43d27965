"""Autograd's gradients of every expert for every token, times masked gates."""

from typing import Any

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    shapes = (12, 6), (8, 6), (8, 5, 6), (8, 5, 6), (8, 6, 5)
    names = "x", "router", "gate", "up", "down"
    grad = randn(12, 6, seed=99)
    for top_k in (1, 2, 8):
        leaves = [randn(*s, seed=rank + i) / 2 for i, s in enumerate(shapes)]
        x, router, gate, up, down = (leaf.requires_grad_() for leaf in leaves)
        scores = (x @ router.T).softmax(-1)
        experts = scores.topk(top_k)[1]
        kept = scores * torch.zeros_like(scores).scatter(1, experts, 1)
        gates = kept / kept.sum(-1, keepdim=True)
        inner = F.silu(torch.einsum("th,efh->tef", x, gate))
        inner = inner * torch.einsum("th,efh->tef", x, up)
        torch.einsum("te,tef,ehf->th", gates, inner, down).backward(grad)
        saved = (*leaves, scores, experts, gates.gather(1, experts))
        with Sent() as sent:
            found = form(grad, tuple(t.detach() for t in saved))
        for name, mine, leaf in zip(names, found, leaves, strict=True):
            what = f"d{name}, {top_k} of 8 experts"
            same(what, mine, gradient(leaf))
    sends(sent, "nothing", 0)
