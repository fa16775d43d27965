"""Load-balancing loss: E times the sum of f_i P_i over the experts i.

    f_i    the part of all token copies that goes to expert i      no gradient
    P_i    the mean probability of expert i                        the gradient's way

Computes:   a loss that is 1 if all experts get as many copies, and E / k at collapse.
Sends:      nothing: a rank's own tokens, of which padded ones do not count.
Leaves out: sums over the tokens of all ranks, its coefficient, checks.
"""

import torch
from torch import Tensor


def load_balancing_loss(
    probabilities_TE: Tensor, experts_Tk: Tensor, mask_T: Tensor | None = None
) -> Tensor:
    """The router's probabilities and choice; the mask is True at tokens that count."""
    if mask_T is not None:
        probabilities_TE, experts_Tk = probabilities_TE[mask_T], experts_Tk[mask_T]
    num_experts = probabilities_TE.shape[1]
    counts_E = torch.bincount(experts_Tk.flatten(), minlength=num_experts)
    f_E = counts_E.to(probabilities_TE.dtype) / max(1, experts_Tk.numel())
    P_E = probabilities_TE.sum(0) / max(1, len(probabilities_TE))
    return num_experts * (f_E * P_E).sum()
