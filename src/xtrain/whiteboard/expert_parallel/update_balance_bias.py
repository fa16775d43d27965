"""Balance without an auxiliary loss: a bias on the choice, moved against the load.

    more copies than the mean: bias - rate        fewer: bias + rate

Computes:   the next bias [E], in place, from the copies that each expert has got.
Sends:      nothing; the counts are those of all ranks, from an all-reduce of E numbers.
Leaves out: that all-reduce, when to stop or to lower the rate, checks.
"""

import torch
from torch import Tensor


@torch.no_grad()
def update_balance_bias(bias_E: Tensor, counts_E: Tensor, rate: float = 1e-3) -> None:
    """Once per optimizer step; the gates are made of the scores without the bias."""
    load_E = counts_E.to(bias_E.dtype)
    bias_E += rate * (load_E.mean() - load_E).sign()
