"""Capacity: how many copies an expert takes at most, and which ones find room.

    capacity = ceil(T k / E * factor)      T tokens, each with k of the E experts
                                           (`xtrain.plan.expert_capacity`)

A factor of 1 is enough only if all experts are chosen equally often. Copies above the
capacity are dropped: their token goes on without that expert. In return every expert's
batch has a size that is known in advance. First choices of all tokens take their places
before second choices do, and earlier tokens before later ones, so which copies are
dropped does not depend on anything but the routing itself.

Source: Lepikhin et al., GShard, 2020; Fedus et al., Switch Transformers, 2021.

Shapes: T tokens, k experts of a token.
"""

import torch
from torch import Tensor

from xtrain.expert_parallel.routing import count_experts


def within_capacity(
    experts_Tk: Tensor,
    num_experts: int,
    capacity: int,
    wanted_Tk: Tensor | None = None,
) -> Tensor:
    """Which copies find room in their expert: [T, k], bool.

    Args:
        wanted_Tk: False for copies that take no place at all, as those of padding.
    """
    if wanted_Tk is not None:
        experts_Tk = experts_Tk.masked_fill(~wanted_Tk, num_experts)
    experts_kT = experts_Tk.t().flatten()  # all first choices, then all second ones
    order = experts_kT.argsort(stable=True)
    counts = count_experts(experts_kT, num_experts + 1)
    first = (counts.cumsum(0) - counts)[experts_kT[order]]
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device) - first
    kept_Tk = (place < capacity).view(experts_Tk.shape[::-1]).t()
    return kept_Tk if wanted_Tk is None else kept_Tk & wanted_Tk
