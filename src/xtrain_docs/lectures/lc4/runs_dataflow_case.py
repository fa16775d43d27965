"""What a data-flow picture needs of a module: its dense twin, input and named tensors.

Shape letters: B batch, S sequence, H hidden, F inner size of the MLP, K inputs and O
outputs of a linear layer, V vocabulary, T tokens, heads: all heads' elements together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

LETTERS = {
    "norm": "H",
    "q_proj": "heads H",
    "k_proj": "heads H",
    "v_proj": "heads H",
    "o_proj": "H heads",
    "gate_proj": "F H",
    "up_proj": "F H",
    "down_proj": "H F",
}


@dataclass(frozen=True)
class Seam:
    """A named tensor of the dense twin: the input or output of one of its modules."""

    name: str
    letters: str
    module: str
    side: str = "out"


@dataclass(frozen=True)
class Case:
    """A module to draw.

    Attributes:
        dense: makes the dense twin; cut: makes the cut module of it.
        input: the whole input. input_dim, output_dim: the dims of which a rank gets and
            gives its slice; None for the whole.
        output_shape: of the dense output.
        seams: the dense tensors that have names.
        taps: submodules of the cut module whose input and output are shown.
        letters: of the module's own parameters, by name.
    """

    name: str
    dense: Callable[[], nn.Module]
    cut: Callable[[nn.Module], nn.Module]
    input: Callable[[], Tensor]
    output_shape: tuple[int, ...]
    seams: list[Seam]
    input_dim: int | None = None
    output_dim: int | None = None
    taps: tuple[str, ...] = ()
    others: Callable[[], tuple[Any, ...]] = tuple
    letters: dict[str, str] = field(default_factory=dict)

    def output_grad(self) -> Tensor:
        """The gradient that the backward starts with."""
        return random_of(7, *self.output_shape)

    def letters_of(self, parameter: str) -> str:
        """The shape letters of a parameter of the dense twin."""
        layer, _, last = ("." + parameter).rpartition(".")
        known = LETTERS | self.letters
        layer = layer.rpartition(".")[2]
        return known.get(
            layer, known["norm"] if "norm" in layer else known.get(last, "")
        )


def random_of(seed: int, *shape: int) -> Tensor:
    """Random numbers, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)
