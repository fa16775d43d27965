"""Muon under data parallelism: each rank makes its own matrices orthogonal for all.

    m <- mu m + (1 - mu) g          d = (1 - mu) g + mu m
    o = d with all singular values near 1: five steps of Newton-Schulz, in bfloat16
    p <- p - lr * decay * p - lr * sqrt(max(1, rows / columns)) * o

Computes:   one step for whole matrices, whose gradients are averaged over the ranks.
Sends:      (N-1)/N of the matrices a step, 2 bytes an element: updates, not momenta.
Leaves out: equal work, sharded weights, stacks of matrices, other scales, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Muon(torch.optim.Optimizer):
    """For hidden matrices alone: embeddings, head, norms and biases take AdamW."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        process_group: Any = None,
    ):
        options = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum}
        super().__init__(params, options)
        self.group, self.rank = process_group, dist.get_rank(process_group)
        self.size = dist.get_world_size(process_group)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        updates: list[Any] = []
        for options in self.param_groups:
            for p in options["params"]:
                owner = len(updates) % self.size
                update = torch.empty_like(p, dtype=torch.bfloat16)
                if owner == self.rank:  # it alone has the momentum
                    update = self._orthogonal(self._direction(p, options["momentum"]))
                work = dist.broadcast(
                    update, group=self.group, group_src=owner, async_op=True
                )
                updates.append((p, update, options, work))
        for p, update, options, work in updates:
            work.wait()
            lr, scale = options["lr"], max(1, p.shape[0] / p.shape[1]) ** 0.5
            p.mul_(1 - lr * options["weight_decay"])
            p.add_(update, alpha=-lr * scale)

    def _direction(self, p: Tensor, mu: float) -> Tensor:
        assert p.grad is not None
        m = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
        m.lerp_(p.grad, 1 - mu)  # in place: the state is kept
        return torch.lerp(p.grad, m, mu)  # Nesterov: this step's gradient once more

    def _orthogonal(self, d: Tensor) -> Tensor:
        a, b, c = 3.4445, -4.7750, 2.0315
        tall = d.shape[0] > d.shape[1]
        x = (d.T if tall else d).bfloat16()  # X X^T is then the smaller square
        x = x / x.norm().clamp(min=1e-7)  # the polynomial needs values of at most 1
        for _ in range(5):
            square = x @ x.T
            polynomial = torch.addmm(square, square, square, beta=b, alpha=c)
            x = torch.addmm(x, polynomial, x, beta=a)  # a X + b S X + c S S X
        return (x.T if tall else x).contiguous()
