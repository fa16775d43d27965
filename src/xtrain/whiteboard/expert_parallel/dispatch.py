"""Dispatch: each copy of a token goes to the rank that has its expert.

    counts [E] all-to-all     every rank learns how many rows come, and for which expert
    rows   [N, H] all-to-all  sorted by expert, and so by rank
    arrived: by sender, then by expert  ->  sorted: by expert, then by sender

Computes:   the rows of this rank's experts, the rows of each, the map for the way back.
Sends:      E/N counts to each other rank, then the rows whose experts are elsewhere.
Leaves out: backward, which is `combine` with gates of 1, dropped copies, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def dispatch(
    x_TH: Tensor, experts_Tk: Tensor, num_experts: int, group: Any = None
) -> tuple[Tensor, Tensor, tuple[Any, ...]]:
    """Rank r has the experts from r E/N on; no rows is a number of rows, too."""
    ranks = dist.get_world_size(group)
    order = experts_Tk.flatten().argsort(stable=True)  # by expert, and so by rank
    token_N = order // experts_Tk.shape[1]  # copy n is of token n // k
    leaving = torch.bincount(experts_Tk.flatten(), minlength=num_experts)
    arriving = torch.empty_like(leaving)  # from rank 0 for my experts, from rank 1, ...
    dist.all_to_all_single(arriving, leaving, group=group)
    sent, received = (c.view(ranks, -1).sum(1).tolist() for c in (leaving, arriving))

    rows = x_TH.new_empty(sum(received), x_TH.shape[1])
    dist.all_to_all_single(rows, x_TH[token_N], received, sent, group=group)

    of_expert = torch.arange(num_experts // ranks, device=x_TH.device).repeat(ranks)
    place = of_expert.repeat_interleave(arriving).argsort(stable=True)
    plan = order, place, sent, received, group
    return rows[place], arriving.view(ranks, -1).sum(0), plan
