"""Five AdamW steps on its part of the inner size equal five of one process."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def check(form: Any, rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole block on every rank
    full = SwiGLU(6, 24)
    mlp = form(full)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (full, mlp)]
    for step in range(5):
        x = randn(3, 5, 6, seed=step)
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = full(whole)
        y.square().sum().backward()
        with Sent() as ahead:
            out = mlp(mine)
        with Sent() as back:
            out.square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    same("the output of step 5", out, y)
    same("its dX", gradient(mine), gradient(whole))
    for name, dim in {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.items():
        part = getattr(full, name).weight.chunk(size, dim)[rank]
        same(f"its part of {name} after 5 steps", getattr(mlp, name), part)
    nbytes = 2 * (size - 1) / size * y.nbytes
    sends(ahead, "forward 2(N-1)/N of y", nbytes)
    sends(back, "backward 2(N-1)/N of x", nbytes)
