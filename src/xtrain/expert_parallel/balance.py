"""Keeping experts equally busy: losses on the router, or a bias on its choice.

    load-balancing loss   E sum_i f_i P_i   f_i: share of all copies that expert i got
                                            P_i: mean probability of expert i
    z-loss                mean of logsumexp(logits)^2
    balance bias          b_i += rate * sign(mean load - load of i), after each step

With equal loads the first is 1 for any number of tokens; if k experts get everything it
is E / k. f is counted and has no gradient; that of P pushes down the probability of
busy experts. The bias enters the choice of experts only, never the
gates, and has no gradient.

Sources: Fedus et al., Switch Transformers, 2021; Zoph et al., ST-MoE, 2022 (z-loss);
Wang et al., Auxiliary-Loss-Free Load Balancing Strategy, 2024; DeepSeek-AI,
DeepSeek-V3 Technical Report, 2024 (per sequence, and bias).

Shapes: T tokens, B sequences, S tokens of a sequence, E experts, k experts of a token.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import all_reduce_identity
from xtrain.expert_parallel.routing import count_experts


def load_balancing_loss(
    probabilities_TE: Tensor,
    experts_Tk: Tensor,
    *,
    mask_T: Tensor | None = None,
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:
    """E sum_i f_i P_i: 1 for equal loads, E if one expert gets all of top-1 routing.

    Args:
        mask_T: False for padding, which does not count.
        groups: the axes of ranks with other tokens; f and P are those of all tokens,
            and the loss is the same on each rank. A rank's backward gives its own
            tokens' part of the gradient, to be summed over ranks.
    """
    num_experts, k = probabilities_TE.shape[1], experts_Tk.shape[1]
    if mask_T is not None:
        probabilities_TE, experts_Tk = probabilities_TE[mask_T], experts_Tk[mask_T]
    counts_E = count_experts(experts_Tk, num_experts).to(probabilities_TE.dtype)
    tokens = counts_E.new_tensor([float(len(experts_Tk))])
    sums_E = probabilities_TE.sum(0)
    totals = torch.cat([counts_E, tokens])
    for group in groups:
        dist.all_reduce(totals, group=group)
        sums_E = all_reduce_identity(sums_E, group)
    counts_E, tokens = totals[:-1], totals[-1:].clamp_min(1)
    return num_experts * (counts_E / (tokens * k) * sums_E / tokens).sum()


def router_z_loss(
    logits_TE: Tensor,
    *,
    mask_T: Tensor | None = None,
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:
    """The mean of logsumexp(logits)^2, which keeps logits small.

    Args:
        mask_T, groups: as in `load_balancing_loss`.
    """
    if mask_T is not None:
        logits_TE = logits_TE[mask_T]
    total = logits_TE.logsumexp(-1).square().sum()
    tokens = total.new_tensor(float(len(logits_TE)))
    for group in groups:
        dist.all_reduce(tokens, group=group)
        total = all_reduce_identity(total, group)
    return total / tokens.clamp_min(1)


def sequence_balance_loss(probabilities_BSE: Tensor, experts_BSk: Tensor) -> Tensor:
    """The load-balancing loss of each sequence by itself, and their mean."""
    losses = [
        load_balancing_loss(probabilities_SE, experts_Sk)
        for probabilities_SE, experts_Sk in zip(
            probabilities_BSE, experts_BSk, strict=True
        )
    ]
    return torch.stack(losses).mean()


@torch.no_grad()
def update_balance_bias(bias_E: Tensor, counts_E: Tensor, rate: float = 1e-3) -> None:
    """Add `rate` to the bias of experts below the mean load, take it from those above.

    In place, once after each step, with the counts of all ranks' tokens.
    """
    loads_E = counts_E.to(bias_E.dtype)
    bias_E += rate * (loads_E.mean() - loads_E).sign()
