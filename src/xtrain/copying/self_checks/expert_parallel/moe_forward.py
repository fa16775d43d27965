"""Every expert for every token, times a gate that is mostly zero."""

from typing import Any

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, randn, same, sends


def check(form: Any, rank: int, size: int) -> None:
    x = randn(12, 6, seed=rank)
    router = randn(8, 6, seed=11)
    gate, up = (randn(8, 5, 6, seed=s) for s in (12, 13))
    down = randn(8, 6, 5, seed=14)
    probabilities = (x @ router.T).softmax(-1)
    inner = F.silu(torch.einsum("th,efh->tef", x, gate))
    inner = inner * torch.einsum("th,efh->tef", x, up)
    everyone = torch.einsum("tef,ehf->teh", inner, down)
    for top_k in (1, 2, 8):
        with Sent() as sent:
            y, _ = form(x, router, gate, up, down, top_k)
        least = probabilities.topk(top_k)[0][:, -1:]
        gates = probabilities * (probabilities >= least)
        gates = gates / gates.sum(-1, keepdim=True)
        expected = torch.einsum("te,teh->th", gates, everyone)
        same(f"{top_k} of 8 experts for each token", y, expected)
    sends(sent, "nothing", 0)
