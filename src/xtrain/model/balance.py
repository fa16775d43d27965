"""Keeping experts equally busy: by losses of the routers, or by biases of their choice.

    router_aux_loss_coef  times k  times  load_balancing_loss, the mean over layers
    router_z_loss_coef             times  router_z_loss

Each layer has experts of its own, so each has a load-balancing loss of its own. With
`router_aux_loss_pooled` it is that of all layers' tokens together, as in transformers:
layers that each prefer another expert then look even. Equal loads give k either way.

On several ranks the losses are of the tokens of all ranks, so they are those of one
process. The backward of a rank gives the part of its own tokens, for `sync_gradients`
to sum. Loads are not linear: two micro-batches have other losses than one batch. Tokens
count with or without a label; those that the mask leaves out do not.

    forward                   each router's copies are counted, over micro-batches
    update_balance_biases     [layers, E] counts, summed over all ranks that have other
                              tokens; each bias moves by `rate` towards equal loads

Every rank holds all biases of its layers, so all move them alike. Forwards without
gradients are not counted, nor those that a checkpoint recomputes.

Sources: Fedus et al., Switch Transformers, 2021; Zoph et al., ST-MoE, 2022; Wang et
al., Auxiliary-Loss-Free Load Balancing Strategy, 2024.

Shapes: T tokens, E experts, k experts of a token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.mesh import axis_group
from xtrain.expert_parallel import MoE, Routing, load_balancing_loss, router_z_loss
from xtrain.model.config import XtrainConfig
from xtrain.model.mesh_axes import axis_size
from xtrain.model.parameters import GRADIENT_AXES
from xtrain.zero.fsdp_schedule import in_backward


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


class CopyCounts:
    """How many copies of tokens each expert has had since the last update."""

    def __init__(self, config: XtrainConfig):
        self.config = config
        self.by_layer: dict[int, Tensor] = {}

    def count(self, routings: Mapping[int, Routing]) -> None:
        """Add those of one forward, if it is trained on."""
        if not torch.is_grad_enabled() or in_backward():  # evaluation, or recomputed
            return
        for layer, routing in routings.items():
            counts_E = routing.counts_E
            before_E = self.by_layer.get(layer)
            self.by_layer[layer] = counts_E if before_E is None else before_E + counts_E

    def table(self, device: torch.device) -> Tensor:
        """[layers of the model, E]; layers that are not here have zeros."""
        shape = self.config.num_hidden_layers, self.config.num_local_experts
        counts = torch.zeros(shape, dtype=torch.int64, device=device)
        for layer, counts_E in self.by_layer.items():
            counts[layer] = counts_E
        return counts


@torch.no_grad()
def update_biases(modules: Sequence[Any], rate: float) -> None:
    """Move the biases of all routers of these modules, by the counts of all ranks.

    Args:
        modules: `DecoderParts`s of one model: the whole, or this rank's stages.

    Raises:
        ValueError: the config has no biases.
    """
    config, mesh = modules[0].config, modules[0].mesh
    if not config.balance_bias:
        raise ValueError(
            "balance_bias=False: this model's routers have no biases to update"
        )
    device = next(modules[0].parameters()).device
    counts = torch.stack([m.copies.table(device) for m in modules]).sum(0)
    for axis in ("pipeline", *GRADIENT_AXES):
        if axis_size(mesh, axis) > 1:
            dist.all_reduce(counts, group=axis_group(mesh, axis))
    for module in modules:
        for number, layer in module.layers.named_children():
            for part in layer.modules():  # a wrapper may be around the layer
                if isinstance(part, MoE):
                    part.router.update_balance_bias(counts[int(number)], rate)
        module.copies.by_layer.clear()
