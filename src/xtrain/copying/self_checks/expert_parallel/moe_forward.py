"""Every expert for every token, times a gate that is mostly zero."""

import torch
import torch.nn.functional as F

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.expert_parallel.moe_forward import moe_forward


def check(rank: int, size: int) -> None:
    x = randn(12, 6, seed=rank, dtype=torch.float64)
    router = randn(8, 6, seed=11, dtype=torch.float64)
    gate, up = (randn(8, 5, 6, seed=s, dtype=torch.float64) for s in (12, 13))
    down = randn(8, 6, 5, seed=14, dtype=torch.float64)
    probabilities = (x @ router.T).softmax(-1)
    inner = F.silu(torch.einsum("th,efh->tef", x, gate))
    inner = inner * torch.einsum("th,efh->tef", x, up)
    everyone = torch.einsum("tef,ehf->teh", inner, down)
    for top_k in (1, 2, 8):
        with Sent() as sent:
            y, _ = moe_forward(x, router, gate, up, down, top_k)
        least = probabilities.topk(top_k)[0][:, -1:]
        gates = probabilities * (probabilities >= least)
        gates = gates / gates.sum(-1, keepdim=True)
        expected = torch.einsum("te,teh->th", gates, everyone)
        same(f"{top_k} of 8 experts for each token", y, expected, 1e-11)
    sends(sent, "nothing", 0)
