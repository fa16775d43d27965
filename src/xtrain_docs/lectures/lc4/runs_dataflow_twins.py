"""The dense twins of the data-flow pictures, and what is cut of them.

Every parameter is random, the same on all ranks, in float64.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain import tensor_parallel
from xtrain.model import XtrainConfig
from xtrain.model.layer import DecoderLayer
from xtrain.model.parts import CutParts, WholeParts
from xtrain.model.placement import placement_of

from .runs_dataflow_case import random_of

BATCH, SEQUENCE, HIDDEN, INNER, VOCABULARY = 3, 4, 8, 12, 20
CONFIG = XtrainConfig(
    vocab_size=VOCABULARY,
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
)


def filled(module: nn.Module) -> nn.Module:
    """Every parameter random, the same on all ranks, in float64."""
    module = module.double()
    with torch.no_grad():
        for number, parameter in enumerate(module.parameters()):
            parameter.copy_(random_of(100 + number, *parameter.shape) / 3)
    return module


class DenseLinear(nn.Linear):
    """`nn.Linear` that shows its product before the bias."""

    def __init__(self) -> None:
        super().__init__(HIDDEN, INNER)
        self.product = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.product(F.linear(x, self.weight)) + self.bias


class DenseCrossEntropy(nn.Module):
    """Each token's loss, with the numbers between shown."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.sums = nn.Identity(), nn.Identity()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        largest = self.largest(logits.amax(-1).detach())
        shifted = logits - largest.unsqueeze(-1)
        target = shifted.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
        sums = self.sums(torch.stack([shifted.exp().sum(-1), target]))
        return sums[0].log() - sums[1]


class CutCrossEntropy(nn.Module):
    """The function as a module."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        function = tensor_parallel.vocab_parallel_cross_entropy
        return function(logits, labels, reduction="none")


def whole_layer() -> nn.Module:
    parts = WholeParts(CONFIG, F.scaled_dot_product_attention)
    return filled(DecoderLayer(parts))


def cut_layer(sequence_parallel: bool) -> Callable[[nn.Module], nn.Module]:
    """A decoder layer with this rank's slices of a whole one's weights."""

    def cut(whole: nn.Module) -> nn.Module:
        group = dist.group.WORLD
        attention = F.scaled_dot_product_attention
        parts = CutParts(CONFIG, attention, sequence_parallel, group)
        layer = DecoderLayer(parts).double()
        full = dict(whole.named_parameters())
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                place = placement_of(name, CONFIG, group.rank(), group.size())
                parameter.copy_(place.of(full[name]))
        return layer

    return cut
