"""The modules of the data-flow pictures, by name. (Letters: `runs_dataflow_case`.)"""

import torch
from torch import Tensor, nn

from xtrain.model.attention import Attention
from xtrain.model.mlp import SwiGLU
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    HiddenParallelEmbedding,
    ParallelAttention,
    ParallelSwiGLU,
    RowParallelLinear,
    VocabParallelEmbedding,
)

from .runs_dataflow_case import Case, Seam, random_of
from .runs_dataflow_twins import (
    BATCH,
    CONFIG,
    HIDDEN,
    INNER,
    SEQUENCE,
    VOCABULARY,
    CutCrossEntropy,
    DenseCrossEntropy,
    DenseLinear,
    cut_layer,
    filled,
    whole_layer,
)


def hidden_states() -> Tensor:
    return random_of(1, BATCH, SEQUENCE, HIDDEN)


def ids(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCABULARY, shape, generator=generator)


def positions() -> tuple[Tensor]:
    return (torch.arange(SEQUENCE),)


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
