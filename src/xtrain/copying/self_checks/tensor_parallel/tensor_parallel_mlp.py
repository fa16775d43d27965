"""Five AdamW steps on a part of the inner size equal five of one process."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from xtrain.copying.self_checks.harness import (
    Group,
    Sent,
    gradient,
    in_both,
    near,
    randn,
    sends,
)
from xtrain.whiteboard.tensor_parallel.tensor_parallel_mlp import (
    TensorParallelMLP,
)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int):
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


def check(group: Group = None, dtype: torch.dtype = torch.float64) -> None:
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    low, exact = in_both(SwiGLU(6, 5 * size), dtype)
    mlp = TensorParallelMLP(low, group)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (exact, mlp)]
    for step in range(5 if dtype == torch.float64 else 1):  # roundings would add up
        x, grad = (randn(3, 7, 6, seed=step + n, dtype=dtype) for n in (0, 9))
        whole, mine = (
            x.to(torch.float64, copy=True).requires_grad_(),
            x.clone().requires_grad_(),
        )
        for optimizer in optimizers:
            optimizer.zero_grad()
        y = exact(whole)
        y.backward(grad.double())
        with Sent(group) as sent:
            out = mlp(mine)
            out.backward(grad)
        near(f"the output of step {step}", out, y, dtype, group)
        near("its dX", gradient(mine), gradient(whole), dtype, group)
        for name, dim in {"gate_proj": 0, "up_proj": 0, "down_proj": 1}.items():
            full = exact.get_parameter(f"{name}.weight")
            part = gradient(full).chunk(size, dim)[rank]
            found = gradient(mlp.get_parameter(name))
            near(f"a part of the gradient of {name}", found, part, dtype, group)
            part = full.chunk(size, dim)[rank]
            near(f"and of {name}", mlp.get_parameter(name), part, dtype, group)
        for optimizer in optimizers:
            optimizer.step()
    formula = f"2(N-1)/N of {out.nbytes:,} bytes of y and of dX"
    sends(sent, formula, 2 * (size - 1) / size * 2 * out.nbytes, group)
