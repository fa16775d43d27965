"""Backward in two parts: the matmuls of each part, and what is kept between them."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from xtrain.model import XtrainConfig
from xtrain.model.modules import PlainModules
from xtrain.pipeline_parallel import split_backward
from xtrain.plan import ModelShape, layer_activations

from ... import runs
from ...figures import REGISTRY
from ...svg import document, rect, text
from ...values import value

BATCH, SEQUENCE = 2, 48
CONFIG = XtrainConfig(
    vocab_size=8, hidden_size=32, intermediate_size=88, num_hidden_layers=1,
    num_attention_heads=4, num_key_value_heads=2,
)  # fmt: skip
aten = torch.ops.aten
MATMULS = (aten.mm, aten.bmm, aten.addmm, aten.addmm_)
WIDTH, LEFT, COLUMN, ROW, TOP = 390, 82, 100, 22, 34
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PARTS = {"F": "forward", "B": "input gradients", "W": "weight gradients"}


def attention(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
    """Causal attention, as the two matmuls that it is."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
    return scores.masked_fill(later, -math.inf).softmax(-1) @ v


class Matmuls(TorchDispatchMode):
    """The matmuls inside: FLOPs of each, and whose weight it reads, if any."""

    def __init__(self, names: dict[int, str]):
        super().__init__()
        self.names, self.found = names, list[tuple[str, int]]()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in MATMULS:
            a, b = args[-2:]
            read = {t.data_ptr() for t in (a, b)} & self.names.keys()
            name = self.names[read.pop()] if read else "attention"
            self.found.append((name, 2 * a.numel() * b.shape[-1]))
        return result


def matmuls_by_part() -> dict[str, dict[str, int]]:
    """FLOPs of a decoder layer's matmuls in F, B and W, by whose they are."""
    layer = PlainModules(CONFIG, attention).layer()
    x = torch.randn(BATCH, SEQUENCE, CONFIG.hidden_size, requires_grad=True)
    names, done = {}, list[str]()
    for name, parameter in layer.named_parameters():
        names[parameter.data_ptr()] = name.split(".")[-2]
        parameter.register_post_accumulate_grad_hook(
            lambda p: done.append(names[p.data_ptr()])
        )
    with Matmuls(names) as in_f, split_backward() as split:
        y = layer(x, torch.arange(SEQUENCE))
    with Matmuls(names) as in_b:
        split.backward_input(y, torch.ones_like(y))
    done.clear()
    with Matmuls(names) as in_w:
        split.backward_weight()
    # a weight's gradient is computed, and then its hook runs
    of_weights = zip(done, (flops for _, flops in in_w.found), strict=True)
    parts = {"F": in_f.found, "B": in_b.found, "W": of_weights}
    return {part: summed(found) for part, found in parts.items()}


def summed(found: Any) -> dict[str, int]:
    sums: dict[str, int] = {}
    for name, flops in found:
        sums[name] = sums.get(name, 0) + flops
    return sums


@REGISTRY
def split_matmuls() -> str:
    """Which matmuls of a decoder layer run in which part; a bar for its FLOPs."""
    (flops,) = runs.remembered(matmuls_by_part, 1)
    most = max(max(of_part.values()) for of_part in flops.values())
    parts = []
    for column, (part, words) in enumerate(PARTS.items()):
        x = LEFT + column * COLUMN
        parts.append(text(x, 14, part, "xt-label"))
        parts.append(text(x, 28, words, "xt-tick"))
    for row, name in enumerate((*LINEARS, "attention")):
        y = TOP + row * ROW
        parts.append(text(LEFT - 8, y + 14, name, "xt-tick", "end"))
        for column, part in enumerate(PARTS):
            if here := flops[part].get(name, 0):
                x, width = LEFT + column * COLUMN, (COLUMN - 8) * here / most
                hover = f"{name} in {part}: {here:,} FLOPs"
                parts.append(rect(x, y + 3, width, 14, column, radius=2, hover=hover))
    words = (
        "Every linear layer has one bar in each part, all three equally long. "
        "Attention has one in forward, one of twice its length in the input's part, "
        "and none in the weights' part."
    )
    high = TOP + ROW * (len(LINEARS) + 1) + 6
    title = "Matmuls of a decoder layer in the three parts"
    return document(WIDTH, high, parts, title, words)


@value
def kept_until_w(preset: str) -> int:
    """Bytes a token between B and W of one layer, in 16 bits: x and dy of linears."""
    shape = ModelShape.preset(preset)
    queries = shape.num_attention_heads * shape.head_dim
    keys = shape.num_key_value_heads * shape.head_dim
    both = 4 * shape.hidden_size + 2 * (queries + keys) + 3 * shape.intermediate_size
    return 2 * both


@value
def kept_until_b(preset: str) -> float:
    """Bytes a token between F and B of one layer with fused kernels, in 16 bits."""
    kept = layer_activations(ModelShape.preset(preset), 1)
    return kept.total - kept.statistics
