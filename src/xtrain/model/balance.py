"""Biases that keep experts equally busy without a loss: counted, then moved.

    forward                   each router's copies are counted, micro-batch after other
    update_balance_biases     [layers, E] counts, summed over all ranks that have other
                              tokens; each bias moves by `rate` towards equal loads

Every rank holds all biases of its layers, so all move them alike. What runs without
gradients is not counted, nor what a checkpoint computes once more.

Source: Wang et al., Auxiliary-Loss-Free Load Balancing Strategy, 2024.

Shapes: E experts.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.comm.mesh import axis_group
from xtrain.expert_parallel import MoE, Routing
from xtrain.model.config import XtrainConfig
from xtrain.model.placement import GRADIENT_AXES, axis_size
from xtrain.zero.fsdp_schedule import in_backward


class CopyCounts:
    """How many copies of tokens each expert has had since the last update."""

    def __init__(self, config: XtrainConfig):
        self.config = config
        self.by_layer: dict[int, Tensor] = {}

    def count(self, routings: Mapping[int, Routing]) -> None:
        """Add those of one forward, if it is trained on."""
        if not torch.is_grad_enabled() or in_backward():  # evaluation, or once more
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
    """Move the biases of all routers of these spans, by the counts of all ranks.

    Args:
        modules: `DecoderSpan`s of one model: the whole, or this rank's stages.

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
