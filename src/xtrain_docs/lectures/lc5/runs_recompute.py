"""Functions that run on a rank: what activation recompute keeps, and computes again."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.flop_counter import FlopCounterMode

from xtrain.model import XtrainConfig
from xtrain.model.layer import DecoderLayer
from xtrain.model.parts import WholeParts
from xtrain.pipeline_parallel import checkpoint
from xtrain.testing.live import LiveStorages
from xtrain.testing.saved import SavedTensors

BATCH, SEQUENCE, HIDDEN = 2, 48, 96
CONFIG = XtrainConfig(
    vocab_size=8,
    hidden_size=HIDDEN,
    intermediate_size=256,
    num_hidden_layers=1,
    num_attention_heads=12,
    num_key_value_heads=4,
)


def layers_of(count: int) -> nn.ModuleList:
    """Layers of an `XtrainModel`, in fp32."""
    torch.manual_seed(0)
    parts = WholeParts(CONFIG, F.scaled_dot_product_attention)
    return nn.ModuleList(DecoderLayer(parts) for _ in range(count))


def layer_input() -> Tensor:
    return torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)


def segments(layers: nn.ModuleList, each: int) -> Iterator[Callable[[Tensor], Tensor]]:
    """The layers as functions of so many of them."""
    positions = torch.arange(SEQUENCE)

    def run(part: list[nn.Module], x: Tensor) -> Tensor:
        for layer in part:
            x = layer(x, positions)
        return x

    for start in range(0, len(layers), each):
        yield partial(run, list(layers)[start : start + each])


def kept_bytes(count: int, each: int) -> int:
    """Bytes that the forward of `count` layers keeps, by segments of `each`.

    With `each` 0 without recompute.
    """
    layers, x = layers_of(count), layer_input()
    with SavedTensors() as saved:
        for segment in segments(layers, each or 1):
            x = checkpoint(segment, x) if each else segment(x)
    return saved.nbytes(but=layers.parameters())


def live_bytes(count: int, each: int) -> list[tuple[str, int, int]]:
    """Bytes of activations and their gradients at every end of a layer's run.

    Runs are "forward", "again" and "backward". Recompute is by segments of `each`; with
    `each` 0 there is none.
    """
    layers, x = layers_of(count), layer_input()
    live, found = LiveStorages(), []

    def note(kind: str, layer: int) -> None:
        gradients = [p.grad for p in layers.parameters() if p.grad is not None]
        nbytes = live.nbytes([*layers.parameters(), *gradients])
        found.append((kind, layer, nbytes))

    def after_forward(index: int, *_: Any) -> None:
        in_backward = torch._C._current_graph_task_id() >= 0
        note("again" if in_backward else "forward", index)

    def after_backward(index: int, *_: Any) -> None:
        note("backward", index)

    for index, layer in enumerate(layers):
        layer.register_forward_hook(partial(after_forward, index))
        layer.register_full_backward_hook(partial(after_backward, index))
    with live:
        for segment in segments(layers, each or 1):
            x = checkpoint(segment, x) if each else segment(x)
        x.sum().backward()
    return found


def flops(count: int) -> dict[str, int]:
    """Operations of all matmuls of a forward and a backward, by kind of recompute."""
    found = {}
    for name, recompute in (
        ("none", lambda function, x: function(x)),
        ("ours", checkpoint),
        ("torch's", partial(torch_checkpoint, use_reentrant=False)),
    ):
        layers, x = layers_of(count), layer_input()
        with FlopCounterMode(display=False) as counter:
            for segment in segments(layers, 1):
                x = recompute(segment, x)
            x.sum().backward()
        found[name] = counter.get_total_flops()
    return found
