"""Keeping experts equally busy: by losses of the routers, or by biases of their choice.

    router_aux_loss_coef  times k   times  load_balancing_loss     mean over layers
    router_sequence_loss_coef       times  sequence_balance_loss   mean over layers
    router_z_loss_coef              times  router_z_loss           mean over layers

Each layer has experts of its own, so each has a load-balancing loss of its own. With
`router_aux_loss_pooled` it is that of all layers' tokens together, as in transformers:
layers that each prefer another expert then look even. Equal loads give k either way.

Stages of a pipeline send what their layers add on with the activations, and the last
one puts it into the loss; so its gradient comes back with that of the activations.

    stage 0  -- x, terms -->  stage 1  -- x, terms -->  loss = cross-entropy + losses

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
from xtrain.expert_parallel import (
    MoE,
    Routing,
    router_z_loss,
    sequence_balance_loss,
)
from xtrain.expert_parallel.balance import balance_of_sums, balance_sums
from xtrain.model.config import LOSSES, XtrainConfig
from xtrain.model.mesh_axes import axis_size
from xtrain.model.parameters import GRADIENT_AXES
from xtrain.zero.fsdp_schedule import in_backward


def adds_losses(config: XtrainConfig) -> bool:
    """Whether routers add anything to the loss."""
    return any(getattr(config, name) for name in LOSSES)


def auxiliary_loss(
    config: XtrainConfig,
    routings: Mapping[int, Routing],
    context: ProcessGroup | None = None,
    data: ProcessGroup | None = None,
    *,
    sequences: int = 1,
) -> Tensor | float:
    """The auxiliary losses of these layers' routers, times their coefficients.

    Args:
        routings: of the last forward, by layer.
        context: ranks that have other tokens of the sequences.
        data: ranks that have other sequences.
        sequences: of the forward.
    """
    if not routings or not adds_losses(config):
        return 0.0
    terms = auxiliary_terms(config, routings, sequences, context, data)
    return loss_of_terms(config, terms, context, data)


def auxiliary_terms(
    config: XtrainConfig,
    routings: Mapping[int, Routing],
    sequences: int,
    context: ProcessGroup | None = None,
    data: ProcessGroup | None = None,
) -> Tensor:
    """What these layers, at least one, add to the terms of others.

    [1], the weighted losses; if pooled [1 + 2 E], with the sums of the pooled loss,
    which are this rank's own.
    """
    shards, others = above_one(context), above_one(data)
    layers = [config.is_moe(layer) for layer in range(config.num_hidden_layers)]
    losses: list[Tensor] = []
    pooled: list[Tensor] = []
    for routing in routings.values():
        both = routing.probabilities_TE, routing.experts_Tk, routing.mask_T
        if config.router_aux_loss_coef:
            sums = balance_sums(*both)
            if config.router_aux_loss_pooled:
                pooled.append(torch.cat(sums))
            else:
                top_k = config.num_experts_per_tok
                loss = balance_of_sums(*sums, top_k, shards + others)
                losses.append(config.router_aux_loss_coef * top_k * loss)
        if config.router_sequence_loss_coef:
            loss = sequence_loss(routing, sequences, shards, others)
            losses.append(config.router_sequence_loss_coef * loss)
        if config.router_z_loss_coef:
            mask_T, groups = routing.mask_T, shards + others
            loss = router_z_loss(routing.logits_TE, mask_T=mask_T, groups=groups)
            losses.append(config.router_z_loss_coef * loss)
    zero = next(iter(routings.values())).logits_TE.new_zeros(())
    parts = [(sum(losses, zero) / sum(layers)).view(1)]
    return torch.cat([*parts, torch.stack(pooled).sum(0)] if pooled else parts)


def loss_of_terms(
    config: XtrainConfig,
    terms: Tensor,
    context: ProcessGroup | None = None,
    data: ProcessGroup | None = None,
) -> Tensor:
    """The auxiliary loss from the summed terms of all layers."""
    loss = terms[0]
    if len(terms) > 1:
        top_k, groups = config.num_experts_per_tok, above_one(context, data)
        counts_E, sums_E = terms[1:].chunk(2)
        pooled = balance_of_sums(counts_E, sums_E, top_k, groups)
        loss = loss + config.router_aux_loss_coef * top_k * pooled
    return loss


def no_terms(config: XtrainConfig, like: Tensor) -> Tensor:
    """Those of a stage without routers: zeros."""
    pooled = config.router_aux_loss_coef and config.router_aux_loss_pooled
    wide = torch.promote_types(like.dtype, torch.float32)
    size = 1 + 2 * config.num_local_experts * bool(pooled)
    return like.new_zeros(size, dtype=wide)


def sequence_loss(
    routing: Routing,
    sequences: int,
    context: list[ProcessGroup],
    data: list[ProcessGroup],
) -> Tensor:
    """`sequence_balance_loss` of one layer; f counts the top k of scores, unbiased."""
    scores_TE, mask_T = routing.probabilities_TE, routing.mask_T
    top_Tk = scores_TE.detach().topk(routing.experts_Tk.shape[1]).indices
    mask_BS = None if mask_T is None else mask_T.view(sequences, -1)
    cut = (t.view(sequences, -1, t.shape[1]) for t in (scores_TE, top_Tk))
    return sequence_balance_loss(
        *cut, mask_BS=mask_BS, sequence_groups=context, groups=data
    )


def above_one(*groups: ProcessGroup | None) -> list[ProcessGroup]:
    """Those of several ranks."""
    return [group for group in groups if group is not None and group.size() > 1]


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
