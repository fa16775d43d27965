"""What routers add to the loss, by the coefficients of the config.

    f_i     copies that went to expert i, of all layers and tokens, per token
    P_i     mean probability of expert i, over all layers and tokens

    router_aux_loss_coef  times  E sum_i f_i P_i
    router_z_loss_coef    times  mean of logsumexp(logits)^2, over all layers and tokens

f and P are those of all layers together, and f adds up to k, as in Hugging Face's
Mixtral: with equal loads the first is k, where `load_balancing_loss` is 1. On several
ranks they are those of the tokens of all ranks, so the loss is that of one process. The
backward of a rank gives the part of its own tokens, for `sync_gradients` to sum.

Tokens are counted whether they have a label or not.

Sources: Fedus et al., Switch Transformers, 2021; Zoph et al., ST-MoE, 2022.

Shapes: T tokens of all layers, E experts, k experts of a token.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.autograd import all_reduce_identity
from xtrain.expert_parallel import Routing
from xtrain.model.config import XtrainConfig


def auxiliary_loss(
    config: XtrainConfig,
    routings: Mapping[int, Routing],
    *groups: ProcessGroup | None,
) -> Tensor | float:
    """The auxiliary losses of these layers' routers, times their coefficients.

    Args:
        routings: of the last forward, by layer.
        groups: ranks that have other tokens: of the sequence, of the batch.
    """
    others = [group for group in groups if group is not None and group.size() > 1]
    total: Tensor | float = 0.0
    if config.router_aux_loss_coef and routings:
        loss = balance_of_layers(list(routings.values()), others)
        total = total + config.router_aux_loss_coef * loss
    if config.router_z_loss_coef and routings:
        loss = z_loss_of_layers(list(routings.values()), others)
        total = total + config.router_z_loss_coef * loss
    return total


def balance_of_layers(routings: list[Routing], others: list[ProcessGroup]) -> Tensor:
    """E sum_i f_i P_i over all layers and ranks."""
    sums_E = torch.stack([r.probabilities_TE.sum(0) for r in routings]).sum(0)
    counts_E = torch.stack([r.counts_E for r in routings]).sum(0).to(sums_E.dtype)
    tokens = sums_E.new_tensor(float(sum(len(r.experts_Tk) for r in routings)))
    for group in others:
        sums_E = all_reduce_identity(sums_E, group)
        dist.all_reduce(counts_E, group=group)
        dist.all_reduce(tokens, group=group)
    return len(counts_E) * (counts_E / tokens * sums_E / tokens).sum()


def z_loss_of_layers(routings: list[Routing], others: list[ProcessGroup]) -> Tensor:
    """The mean of logsumexp(logits)^2 over all layers and ranks."""
    parts = [r.logits_TE.logsumexp(-1).square().sum() for r in routings]
    total = torch.stack(parts).sum()
    tokens = total.new_tensor(float(sum(len(r.experts_Tk) for r in routings)))
    for group in others:
        total = all_reduce_identity(total, group)
        dist.all_reduce(tokens, group=group)
    return total / tokens
