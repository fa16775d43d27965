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
        logits_TE = F.linear(x_TH.to(wide), self.router.to(wide))
        chosen_Tk, experts_Tk = logits_TE.topk(k)
        gates_Tk = chosen_Tk.softmax(-1).to(x.dtype)  # of the k alone: they sum to 1

        order_N = experts_Tk.flatten().argsort(stable=True)  # by expert, so by rank
        token_N = order_N // k  # copy n is of token n // k
        leaving_E = torch.bincount(experts_Tk.flatten(), minlength=E)
        arriving = torch.empty_like(
            leaving_E
        )  # from rank 0 to my L experts, from 1, ...
        dist.all_to_all_single(arriving, leaving_E, group=self.group)
        sent = leaving_E.view(-1, L).sum(1).tolist()  # rows to each rank
        received = arriving.view(-1, L).sum(1).tolist()
        rows = _AllToAll.apply(x_TH[token_N], sent, received, self.group)

        outputs = []
        for n, part in enumerate(rows.split(arriving.tolist())):
            i = n % L  # my experts again and again, once for each sender
            inner = F.silu(part @ self.gate_proj[i].mT) * (part @ self.up_proj[i].mT)
            outputs.append(inner @ self.down_proj[i].mT)

        home_N = _AllToAll.apply(torch.cat(outputs), received, sent, self.group)
        copies_TkH = home_N[order_N.argsort()].unflatten(0, experts_Tk.shape)
        return (copies_TkH * gates_Tk.unsqueeze(-1)).sum(1).view_as(x)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Any, received: Any, group: Any) -> Tensor:
        ctx.way_back = received, sent, group
        came = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(came, rows.contiguous(), received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllToAll.apply(grad, *ctx.way_back), None, None, None
