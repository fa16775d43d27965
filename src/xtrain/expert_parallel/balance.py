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
DeepSeek-V3 Technical Report, 2024 (per sequence, eq. 17 to 20, and bias).

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
    counts_E, sums_E = balance_sums(probabilities_TE, experts_Tk, mask_T)
    return balance_of_sums(counts_E, sums_E, experts_Tk.shape[1], groups)


def balance_sums(
    probabilities_TE: Tensor, experts_Tk: Tensor, mask_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """How many copies each expert got, and the sum of its probabilities: [E] each."""
    if mask_T is not None:
        probabilities_TE, experts_Tk = probabilities_TE[mask_T], experts_Tk[mask_T]
    counts_E = count_experts(experts_Tk, probabilities_TE.shape[1])
    return counts_E.to(probabilities_TE.dtype), probabilities_TE.sum(0)


def balance_of_sums(
    counts_E: Tensor,
    sums_E: Tensor,
    top_k: int,
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:
    """The load-balancing loss of `balance_sums`, also of each row of [..., E]."""
    counts_E = counts_E.detach().clone()
    for group in groups:
        dist.all_reduce(counts_E, group=group)
        sums_E = all_reduce_identity(sums_E, group)
    tokens = (counts_E.sum(-1, keepdim=True) / top_k).clamp_min(1)
    terms_E = counts_E / (tokens * top_k) * sums_E / tokens
    return counts_E.shape[-1] * terms_E.sum(-1)


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


def sequence_balance_loss(
    probabilities_BSE: Tensor,
    experts_BSk: Tensor,
    *,
    mask_BS: Tensor | None = None,
    sequence_groups: Sequence[ProcessGroup | None] = (),
    groups: Sequence[ProcessGroup | None] = (),
) -> Tensor:
    """The load-balancing loss of each sequence by itself, and their mean.

    The report has E in f, and so the same product. Its f counts the top k of the scores
    without the balance bias: give those as `experts_BSk` where the choice has a bias.

    Args:
        mask_BS: False for padding; a sequence of padding alone does not count.
        sequence_groups: ranks that have other tokens of the same sequences.
        groups: ranks that have other sequences.
    """
    top_k, experts = experts_BSk.shape[-1], probabilities_BSE.shape[-1]
    counted_BSk = torch.ones_like(experts_BSk, dtype=probabilities_BSE.dtype)
    if mask_BS is not None:
        counted_BSk = counted_BSk * mask_BS[..., None]
        probabilities_BSE = probabilities_BSE * mask_BS[..., None]
    counts_BE = counted_BSk.new_zeros(len(counted_BSk), experts)
    counts_BE.scatter_add_(1, experts_BSk.flatten(1), counted_BSk.flatten(1))
    sums_BE = probabilities_BSE.sum(1)
    losses_B = balance_of_sums(counts_BE, sums_BE, top_k, sequence_groups)
    total, sequences = losses_B.sum(), counts_BE.sum(-1)
    for group in sequence_groups:
        dist.all_reduce(sequences, group=group)
    sequences = (sequences > 0).sum()
    for group in groups:
        dist.all_reduce(sequences, group=group)
        total = all_reduce_identity(total, group)
    return total / sequences.clamp_min(1)


@torch.no_grad()
def update_balance_bias(bias_E: Tensor, counts_E: Tensor, rate: float = 1e-3) -> None:
    """Add `rate` to the bias of experts below the mean load, take it from those above.

    In place, once after each step, with the counts of all ranks' tokens.
    """
    loads_E = counts_E.to(bias_E.dtype)
    bias_E += rate * (loads_E.mean() - loads_E).sign()
