"""The model of the support matrix, its batches, and its first weights.

Small, and with what breaks naive wrappers: odd sizes, a ModuleList, parameters that are
tied, frozen, or used on some ranks only. Everything is drawn on the CPU, so ranks with
GPUs begin with the same numbers.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

VOCAB, WIDTH, LAYERS = 11, 6, 2


class Block(nn.Module):
    """A residual block; `gate` is the parameter that a rank may leave out."""

    def __init__(self, gated: bool, inner: int):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, inner)
        self.down = nn.Linear(inner, WIDTH)
        self.gate = nn.Parameter(torch.empty(WIDTH)) if gated else None
        self.leave_out = False

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is not None and not self.leave_out:
            x = x * self.gate
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Toy(nn.Module):
    """A language model: tokens in, logits out.

    Args:
        tied: the head's weight is the embedding's.
        frozen: one weight is not trained.
        gated: the blocks have gates, see `leave_out`.
        recompute: a checkpoint, which computes the blocks once more in backward.
        inner: the width within the blocks.
    """

    def __init__(
        self,
        tied: bool = False,
        frozen: bool = False,
        gated: bool = False,
        recompute: Callable[..., Tensor] | None = None,
        inner: int = WIDTH + 3,
    ):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList([Block(gated, inner) for _ in range(LAYERS)])
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.offset = nn.Parameter(torch.empty(VOCAB))
        if tied:
            self.head.weight = self.embedding.weight
        if frozen:
            self.layers[1].up.weight.requires_grad_(False)
        self.recompute = recompute
        self.overflow = False

    def leave_out(self, gates: bool) -> None:
        """Whether the forwards to come use the gates."""
        for layer in self.layers:
            layer.leave_out = gates

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.enter_blocks(self.embedding(tokens))
        for layer in self.layers:
            x = self.recompute(layer, x) if self.recompute else layer(x)
        x = self.leave_blocks(x)
        offset = self.offset * 1
        if self.overflow:  # in one parameter, so that one rank's shard has it
            offset.register_hook(lambda gradient: gradient * math.inf)
        return self.head(x) + offset

    def enter_blocks(self, x: Tensor) -> Tensor:
        """What the blocks are given; a cut Toy takes its slice of the sequence."""
        return x

    def leave_blocks(self, x: Tensor) -> Tensor:
        return x


def make(seed: int, dtype: torch.dtype, **options: Any) -> Toy:
    """A Toy with weights that every floating-point dtype can hold."""
    model = Toy(**options)
    generator = torch.Generator("cpu").manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            sixteenths = torch.randint(
                -6, 7, parameter.shape, generator=generator, device="cpu"
            )
            parameter.copy_(sixteenths / 16)
    return model.to(dtype)


def batch(step: int, micro: int, rank: int, stream: int, length: int) -> Tensor:
    """Token ids; ranks have different numbers of rows, groups different streams."""
    seed = 1000 * stream + 100 * step + 10 * micro + rank
    generator = torch.Generator("cpu").manual_seed(seed)
    shape = (2 + (step + rank) % 2, length)
    tokens = torch.randint(0, VOCAB, shape, generator=generator, device="cpu")
    return tokens.to(torch.get_default_device())


def loss_of(logits: Tensor, tokens: Tensor) -> Tensor:
    """A sum over tokens: what ranks have adds up to what one process has."""
    wide = logits[:, :-1].flatten(0, 1)
    wide = wide if wide.dtype == torch.float64 else wide.float()
    return F.cross_entropy(wide, tokens[:, 1:].flatten(), reduction="sum") / 8
