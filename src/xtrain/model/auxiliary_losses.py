"""What routers add to the loss, by the coefficients of the config.

    router_aux_loss_coef  times k  times  load_balancing_loss
    router_z_loss_coef             times  router_z_loss

Both are of the tokens of all layers together, as in Hugging Face's Mixtral, whose first
loss does not divide by k: with equal loads it is k. On several ranks they are of the
tokens of all ranks, so the loss is that of one process. The backward of a rank gives
the part of its own tokens, for `sync_gradients` to sum.

Tokens are counted whether they have a label or not.

Sources: Fedus et al., Switch Transformers, 2021; Zoph et al., ST-MoE, 2022.

Shapes: T tokens of all layers, E experts, k experts of a token.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.expert_parallel import Routing, load_balancing_loss, router_z_loss
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
    if not routings:
        return total
    layers = list(routings.values())
    if config.router_aux_loss_coef:
        probabilities_TE = torch.cat([layer.probabilities_TE for layer in layers])
        experts_Tk = torch.cat([layer.experts_Tk for layer in layers])
        loss = load_balancing_loss(probabilities_TE, experts_Tk, groups=others)
        total = total + config.router_aux_loss_coef * experts_Tk.shape[1] * loss
    if config.router_z_loss_coef:
        logits_TE = torch.cat([layer.logits_TE for layer in layers])
        total = total + config.router_z_loss_coef * router_z_loss(
            logits_TE, groups=others
        )
    return total
