"""Capacity: an expert takes so many copies and no more; who comes later is dropped.

    C = ceil(factor * T k / E)      the order: first choices of all tokens, then second

Computes:   C, and a mask [T, k] of the copies that find a place.
Sends:      nothing: each rank counts its own tokens, and has C places in every expert.
Leaves out: padding each expert's rows to C, padded tokens, checks.
"""

from fractions import Fraction
from math import ceil

import torch
from torch import Tensor


def expert_capacity(
    experts_Tk: Tensor, num_experts: int, capacity_factor: float
) -> tuple[int, Tensor]:
    """A dropped copy gives 0: the residual alone carries its token on."""
    factor = Fraction(str(capacity_factor))  # 1.1 x 100 are 110, not 110.00000000000001
    capacity = ceil(factor * experts_Tk.numel() / num_experts)
    queue = experts_Tk.t().flatten()  # choice by choice, in each of them token by token
    order = queue.argsort(stable=True)  # expert by expert, in the order of the queue
    counts_E = torch.bincount(queue, minlength=num_experts)
    first_E = counts_E.cumsum(0) - counts_E
    place = torch.empty_like(queue)
    place[order] = torch.arange(len(queue), device=queue.device) - first_E[queue[order]]
    return capacity, (place < capacity).view(experts_Tk.t().shape).t()
