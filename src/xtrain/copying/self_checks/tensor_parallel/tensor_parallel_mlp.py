"""Five AdamW steps on a quarter of the inner size equal five of one process."""

import torch
import torch.nn.functional as F
from torch import nn

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.whiteboard.tensor_parallel.tensor_parallel_mlp import TensorParallelMLP


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def check(rank: int, size: int) -> None:
    torch.manual_seed(0)  # the same whole block on every rank
    full = SwiGLU(6, 12).double()
    mlp = TensorParallelMLP(full)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (full, mlp)]
    for step in range(5):
        x = randn(3, 5, 6, seed=step, dtype=torch.float64)
        whole, mine = x.clone().requires_grad_(), x.clone().requires_grad_()
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = full(whole)
        y.square().sum().backward()
        with Sent() as sent:
            out = mlp(mine)
            out.square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    same("the output of step 5", out, y, 1e-12)
    same("its dX", gradient(mine), gradient(whole), 1e-12)
    for name, dim in {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.items():
        part = getattr(full, name).weight.chunk(size, dim)[rank]
        same(f"a quarter of {name} after 5 steps", getattr(mlp, name), part, 1e-12)
    formula = f"2(N-1)/N of {y.nbytes:,} bytes of y and of dX"
    sends(sent, formula, 2 * (size - 1) / size * 2 * y.nbytes)
