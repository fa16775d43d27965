"""GShard: the experts of an MoE layer over the ranks, and tokens that travel to them.

    router -> counts -> rows -- all-to-all --> my experts -- all-to-all --> gates, sum

Computes:   `moe(x)` of this rank's tokens; backward, its experts' gradients, whole.
Sends:      E/N counts to each other rank; rows to and from, forward and backward.
Leaves out: the sum of the router's gradients, one product an expert, capacity, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn


class GShardMoE(nn.Module):
    """Of a module with router.weight, router.top_k and experts.gate_proj [E, F, H]."""

    def __init__(self, moe: Any, group: Any = None):
        super().__init__()
        self.router = nn.Parameter(moe.router.weight.detach().clone())
        self.top_k, self.group = moe.router.top_k, group
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        full = moe.experts.gate_proj, moe.experts.up_proj, moe.experts.down_proj
        mine = [nn.Parameter(p.detach().chunk(ranks)[rank].clone()) for p in full]
        self.gate_proj, self.up_proj, self.down_proj = mine

    def forward(self, x: Tensor) -> Tensor:
        E, L, k = len(self.router), len(self.gate_proj), self.top_k
        x_TH, wide = x.flatten(0, -2), torch.promote_types(x.dtype, torch.float32)
        logits, experts = F.linear(x_TH.to(wide), self.router.to(wide)).topk(k)
        gates = logits.softmax(-1).to(x.dtype).unsqueeze(-1)  # of the k: they sum to 1
        order = experts.flatten().argsort(stable=True)  # copy n is of token n // k
        leaving = torch.bincount(experts.flatten(), minlength=E)
        arriving = torch.empty_like(leaving)  # from rank 0 to my L experts, from 1, ...
        dist.all_to_all_single(arriving, leaving, group=self.group)
        sent, got = (c.view(-1, L).sum(1).tolist() for c in (leaving, arriving))
        rows = _AllToAll.apply(x_TH[order // k], sent, got, self.group)
        done = []
        for n, part in enumerate(rows.split(arriving.tolist())):
            i = n % L
            inner = F.silu(part @ self.gate_proj[i].mT) * (part @ self.up_proj[i].mT)
            done.append(inner @ self.down_proj[i].mT)
        y = _AllToAll.apply(torch.cat(done), got, sent, self.group)[order.argsort()]
        return (y.unflatten(0, experts.shape) * gates).sum(1).view_as(x)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Any, got: Any, group: Any) -> Tensor:
        ctx.dual = got, sent, group
        came = rows.new_empty(sum(got), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), got, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, *ctx.dual), None, None, None
