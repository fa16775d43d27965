"""The modules of the data-flow pictures: each cut one with its dense twin.

Shape letters: B batch, S sequence, H hidden, F inner size of the MLP, K inputs and O
outputs of a linear layer, V vocabulary, T tokens, heads: all heads' elements together.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain import tensor_parallel
from xtrain.model import XtrainConfig
from xtrain.model.attention import Attention
from xtrain.model.layer import DecoderLayer
from xtrain.model.mlp import SwiGLU
from xtrain.model.parts import CutParts, WholeParts
from xtrain.model.placement import placement_of
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    ParallelAttention,
    ParallelSwiGLU,
    RowParallelLinear,
    VocabParallelEmbedding,
)

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


def hidden_states() -> Tensor:
    return random_of(1, BATCH, SEQUENCE, HIDDEN)


def ids(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCABULARY, shape, generator=generator)


def positions() -> tuple[Tensor]:
    return (torch.arange(SEQUENCE),)


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


def linear(name: str, cut: type, input_dim: int | None, output_dim: int | None) -> Case:
    """A linear layer with a bias."""
    return Case(
        name,
        lambda: filled(DenseLinear()),
        cut.from_full,
        hidden_states,
        (BATCH, SEQUENCE, INNER),
        [
            Seam("x", "B S K", "", "in"),
            Seam("x Wᵀ", "B S O", "product"),
            Seam("y", "B S O", ""),
        ],
        input_dim=input_dim,
        output_dim=output_dim,
        letters={"weight": "O K", "bias": "O"},
    )


def embedding(name: str, cut: type) -> Case:
    return Case(
        name,
        lambda: filled(nn.Embedding(VOCABULARY, HIDDEN)),
        cut.from_full,
        lambda: ids(BATCH, SEQUENCE),
        (BATCH, SEQUENCE, HIDDEN),
        [Seam("ids", "B S", "", "in"), Seam("y", "B S H", "")],
        letters={"weight": "V H"},
    )


def attention_seams(at: str = "") -> list[Seam]:
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
    seams = [Seam(n, "B S heads", at + module) for n, module in names.items()]
    return [*seams, Seam("heads' output", "B S heads", f"{at}o_proj", "in")]


def attention(name: str) -> Case:
    """Two query heads read each of the key heads; on four ranks two ranks hold it."""
    return Case(
        name,
        lambda: filled(Attention(CONFIG)),
        ParallelAttention.from_full,
        hidden_states,
        (BATCH, SEQUENCE, HIDDEN),
        [Seam("x", "B S H", "", "in"), *attention_seams(), Seam("y", "B S H", "")],
        others=positions,
    )


def swiglu_seams(at: str = "") -> list[Seam]:
    names = {"gate": "gate_proj", "up": "up_proj"}
    seams = [Seam(n, "B S F", at + module) for n, module in names.items()]
    return [*seams, Seam("silu(gate) · up", "B S F", f"{at}down_proj", "in")]


def layer(name: str, sequence_parallel: bool) -> Case:
    """A decoder layer; its norms are shown, too."""
    norms = ("input_layernorm", "post_attention_layernorm")
    return Case(
        name,
        whole_layer,
        cut_layer(sequence_parallel),
        hidden_states,
        (BATCH, SEQUENCE, HIDDEN),
        [
            Seam("x", "B S H", "", "in"),
            Seam("norm of x", "B S H", norms[0]),
            *attention_seams("self_attn."),
            Seam("attention", "B S H", "self_attn"),
            Seam("x + attention", "B S H", norms[1], "in"),
            Seam("its norm", "B S H", norms[1]),
            *swiglu_seams("mlp."),
            Seam("MLP", "B S H", "mlp"),
            Seam("y", "B S H", ""),
        ],
        input_dim=1 if sequence_parallel else None,
        output_dim=1 if sequence_parallel else None,
        taps=norms,
        others=positions,
    )


CASES = {
    case.name: case
    for case in (
        linear("column_linear", ColumnParallelLinear, None, -1),
        linear("row_linear", RowParallelLinear, -1, None),
        embedding("vocab_parallel_embedding", VocabParallelEmbedding),
        embedding("hidden_parallel_embedding", HiddenParallelEmbedding),
        Case(
            "cross_entropy",
            DenseCrossEntropy,
            lambda _: CutCrossEntropy(),
            lambda: random_of(1, BATCH * SEQUENCE, VOCABULARY),
            (BATCH * SEQUENCE,),
            [
                Seam("logits", "T V", "", "in"),
                Seam("largest logit", "T", "largest"),
                Seam("sum of exp, label's", "2 T", "sums"),
                Seam("loss", "T", ""),
            ],
            input_dim=-1,
            others=lambda: (ids(BATCH * SEQUENCE),),
        ),
        Case(
            "swiglu",
            lambda: filled(SwiGLU(CONFIG)),
            ParallelSwiGLU.from_full,
            hidden_states,
            (BATCH, SEQUENCE, HIDDEN),
            [Seam("x", "B S H", "", "in"), *swiglu_seams(), Seam("y", "B S H", "")],
        ),
        attention("attention"),
        layer("decoder_layer", False),
        layer("decoder_layer_sequence_parallel", True),
    )
}  # fmt: skip
