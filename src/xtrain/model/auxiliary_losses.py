"""What routers add to the loss, by the coefficients of the config.

    router_aux_loss_coef  times k  times  load_balancing_loss, the mean over layers
    router_z_loss_coef             times  router_z_loss

Each layer has experts of its own, so each has a load-balancing loss of its own. With
`router_aux_loss_pooled` it is that of all layers' tokens together, as in transformers:
layers that each prefer another expert then look even. Equal loads give k either way.

On several ranks the losses are of the tokens of all ranks, so they are those of one
process. The backward of a rank gives the part of its own tokens, for `sync_gradients`
to sum. Loads are not linear: two micro-batches have other losses than one batch.

Tokens are counted whether they have a label or not, but for those of the mask.

Sources: Fedus et al., Switch Transformers, 2021; Zoph et al., ST-MoE, 2022.

Shapes: T tokens, E experts, k experts of a token.
"""

from collections.abc import Mapping, Sequence

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
        pools = [layers] if config.router_aux_loss_pooled else [[one] for one in layers]
        losses = [
            load_balancing_loss(
                tokens_of(pool, "probabilities_TE"),
                tokens_of(pool, "experts_Tk"),
                mask_T=masks_of(pool),
                groups=others,
            )
            for pool in pools
        ]
        scale = config.router_aux_loss_coef * layers[0].experts_Tk.shape[1]
        total = total + scale * torch.stack(losses).mean()
    if config.router_z_loss_coef:
        logits_TE = tokens_of(layers, "logits_TE")
        z = router_z_loss(logits_TE, mask_T=masks_of(layers), groups=others)
        total = total + config.router_z_loss_coef * z
    return total


def tokens_of(layers: Sequence[Routing], name: str) -> Tensor:
    """What routers have of each token, of the tokens of all these layers."""
    return torch.cat([getattr(layer, name) for layer in layers])


def masks_of(layers: Sequence[Routing]) -> Tensor | None:
    """The masks of all these layers; all have one, or none has."""
    return None if layers[0].mask_T is None else tokens_of(layers, "mask_T")
