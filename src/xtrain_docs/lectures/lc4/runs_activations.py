"""Functions that run on every rank: what a forward pass of lc4 keeps for backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.comm.autograd import all_gather_split
from xtrain.model import XtrainConfig
from xtrain.model.layer import DecoderLayer
from xtrain.model.parts import CutParts
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    vocab_parallel_cross_entropy,
)
from xtrain.tensor_parallel.functions import column_linear
from xtrain.testing.saved import SavedTensors, address

SIZES = {"batch": 2, "sequence": 48, "hidden": 96, "heads": 12}
KEY_HEADS, INNER = 4, 288  # of our own layer
BF16 = torch.bfloat16


def kept_by(module: nn.Module, *inputs: Tensor) -> int:
    """Bytes that one forward pass of `module` keeps."""
    with SavedTensors() as saved:
        module(*inputs)
    return saved.nbytes(but=module.parameters())


def layer_input(sequence_parallel: bool) -> Tensor:
    """What a layer gets: the whole sequence, or this rank's slice."""
    ranks = dist.get_world_size() if sequence_parallel else 1
    batch, sequence, hidden, _ = SIZES.values()
    return torch.randn(batch, sequence // ranks, hidden, dtype=BF16, requires_grad=True)


class ClassicLayer(nn.Module):
    """The layer of the formula: LayerNorm, the attention matrix kept, GELU, dropout.

    Dropout is torch's fused one, which keeps one byte an element; seeds do not matter
    here.
    """

    def __init__(self, sequence_parallel: bool):
        super().__init__()
        hidden = SIZES["hidden"]
        self.head_dim = hidden // SIZES["heads"]
        cut: dict[str, Any] = {"sequence_parallel": sequence_parallel, "dtype": BF16}
        self.norms = nn.ModuleList(nn.LayerNorm(hidden, dtype=BF16) for _ in range(2))
        self.qkv = nn.ModuleList(
            ColumnParallelLinear(hidden, hidden, **cut) for _ in range(3)
        )
        self.out = RowParallelLinear(hidden, hidden, **cut)
        self.up = ColumnParallelLinear(hidden, 4 * hidden, **cut)
        self.down = RowParallelLinear(4 * hidden, hidden, **cut)

    def forward(self, x: Tensor) -> Tensor:
        x = x + dropout(self.attention(self.norms[0](x)))
        return x + dropout(self.down(F.gelu(self.up(self.norms[1](x)))))

    def attention(self, x: Tensor) -> Tensor:
        weights = [layer.weight for layer in self.qkv]
        q, k, v = (
            t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for t in column_linear(x, weights, self.out.sequence_dim)
        )
        scores = (q * self.head_dim**-0.5) @ k.transpose(-1, -2)
        weights = dropout(scores.softmax(-1))
        return self.out((weights @ v).transpose(1, 2).flatten(2))


def dropout(x: Tensor) -> Tensor:
    """torch's, with a mask of one byte an element, as on a GPU."""
    return torch.native_dropout(x, 0.1, True)[0]


def kept_by_classic_layer(sequence_parallel: bool) -> int:
    """Bytes a rank keeps of one forward of the classic layer in bf16."""
    return kept_by(ClassicLayer(sequence_parallel), layer_input(sequence_parallel))


def kept_by_our_layer(sequence_parallel: bool) -> int:
    """Bytes a rank keeps of one forward of a layer of `XtrainModel` in bf16."""
    config = XtrainConfig(
        vocab_size=8,
        hidden_size=SIZES["hidden"],
        intermediate_size=INNER,
        num_hidden_layers=1,
        num_attention_heads=SIZES["heads"],
        num_key_value_heads=KEY_HEADS,
    )
    world = dist.group.WORLD
    assert world is not None
    attention = F.scaled_dot_product_attention
    parts = CutParts(config, attention, sequence_parallel, world)
    layer = DecoderLayer(parts).to(BF16)
    positions = torch.arange(SIZES["sequence"])
    return kept_by(layer, layer_input(sequence_parallel), positions)


def kept_by_loss(gathered: bool, tokens: int, vocabulary: int) -> dict[str, Any]:
    """Bytes that the loss of fp32 logits keeps on this rank.

    Args:
        gathered: gather all logits on every rank, and take torch's loss of them.

    Returns also whether the gradient lies in memory that forward kept.
    """
    columns = vocabulary // dist.get_world_size()
    local = torch.randn(tokens, columns, requires_grad=True)
    logits = local * 1.0  # what the head hands over, not a leaf
    gradients: list[Tensor] = []
    logits.register_hook(gradients.append)
    labels = torch.arange(tokens) % vocabulary
    loss: Callable[..., Tensor] = vocab_parallel_cross_entropy
    with SavedTensors() as saved:
        if gathered:
            loss = F.cross_entropy(all_gather_split(logits, -1), labels)
        else:
            loss = vocab_parallel_cross_entropy(logits, labels)
    loss.backward()
    in_place = address(gradients[0]) in saved.storages
    return {"bytes": saved.nbytes(), "in place": in_place}
