"""Bytes of activations that a layer keeps for backward, on one device.

    of a GPT layer, in units of s b h          tensor parallelism   and of the sequence
    inputs of two norms              4         4                    4 / t
    inputs of q, k, v and of the MLP 4         4                    4 / t
    masks of two dropouts            2         2                    2 / t
    between a column and a row      24         24 / t               24 / t
    scores: softmax, mask, dropout   5 a s/h   5 a s/h / t          5 a s/h / t

`activation_memory` counts that layer: elements of two bytes, dropout masks of one; a
GELU layer four times as wide; scores are kept, as they are without a fused attention.
"selective" recomputes the scores, "full" the whole layer from its input.

`layer_activations` counts a layer with fused attention, SwiGLU and RMSNorm:

    in units of one token, 2 bytes an element      elements      divided by t
    inputs of two norms, and what they return      4 h           with slices only
    queries, output of attention                   2 a d         yes
    keys, values                                   2 k d         yes
    gate, up, and their product                    3 f           yes
    log-sum-exp of attention, fp32                 a             yes

    "selective" keeps 2 h, and 2 f of the MLP: norms and activation functions are
    computed again, and so are queries, keys and values of latent attention

    sum with slices of the sequence over t    (12 h + 4 h k/a + 6 f) / t bytes a token

Of experts, a token's k copies go in and come out, each with its own inner values; the
router keeps its scores and probabilities in fp32. A recomputed layer keeps its input
alone and, during its recomputation, everything of one layer. A fused kernel recomputes
the scores of attention by itself.

Sources: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models, 2022, section 4 and table 2; own count of what each operation reads in backward;
Dao et al., 2022 (the log-sum-exp); DeepSeek-AI, DeepSeek-V3, 2024, section 3.2.3 (what
is cheap to compute again).

Symbols: s sequence, b batch, h hidden size, a heads, k key heads, d head size, f inner
size, t tensor ranks.
"""

from dataclasses import dataclass
from fractions import Fraction

from xtrain.plan.checks import require_one_of, require_whole
from xtrain.plan.published import LatentShape
from xtrain.plan.shapes import ModelShape
from xtrain.plan.traffic import FP32

RECOMPUTE = ("none", "selective", "full")


def activation_memory(
    sequence: int,
    batch: int,
    hidden: int,
    heads: int,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
) -> float:
    """Bytes per layer and rank that a GPT layer keeps for its backward.

    Args:
        sequence: tokens of one sequence; `batch` of them.
        heads: of the whole layer.
        tensor: ranks that share the layer.
        sequence_parallel: they share the sequence outside its matrices, too. With
            `recompute="full"` the one input that is kept is a slice of the sequence.
        recompute: "none", "selective" or "full".
    """
    sizes = (sequence, batch, hidden, heads, tensor)
    if min(sizes) < 1:
        raise ValueError(
            f"sequence, batch, hidden, heads, tensor = {sizes}: none may be below 1"
        )
    require_one_of("recompute", recompute, RECOMPUTE)
    share = Fraction(1, tensor)
    outside = share if sequence_parallel else Fraction(1)
    unit = sequence * batch * hidden
    if recompute == "full":
        return float(2 * unit * outside)
    inside = Fraction(24)
    if recompute == "none":
        inside += Fraction(5 * heads * sequence, hidden)
    return float(unit * (10 * outside + inside * share))


HALF = 2


@dataclass(frozen=True, slots=True)
class LayerActivations:
    """Bytes on one rank, by what they are."""

    norms: float
    """What goes into the two norms and comes out of them; or a layer's one input."""
    attention: float
    statistics: float
    mlp: float
    experts: float = 0.0
    """Copies of tokens before and after the experts, and the router's scores."""

    @property
    def total(self) -> float:
        return self.norms + self.attention + self.statistics + self.mlp + self.experts


def layer_activations(
    shape: ModelShape,
    tokens: int,
    *,
    layer: int | None = None,
    tensor: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    itemsize: int = HALF,
) -> LayerActivations:
    """What a layer keeps of `tokens` tokens of a micro-batch, on one rank.

    Args:
        tokens: that a rank has in attention: batch x sequence / context ranks.
        layer: its number; the last unless given.
        tensor: ranks that share the layer.
        sequence_parallel: they share the sequence outside its matrices, too.
        recompute: "none", "selective" or "full".
        itemsize: bytes of an activation.
    """
    require_whole("tokens", tokens)
    require_whole("tensor", tensor)
    require_one_of("recompute", recompute, RECOMPUTE)
    number = shape.num_hidden_layers - 1 if layer is None else layer
    unit = tokens * itemsize
    outside = unit * shape.hidden_size / (tensor if sequence_parallel else 1)
    if recompute == "full":
        return LayerActivations(outside, 0.0, 0.0, 0.0)
    moe, again = shape.is_moe(number), recompute == "selective"
    inner = (shape.mlp_matrices - again) * shape.intermediate_size
    if moe:  # shared experts are one SwiGLU
        inner = (
            (3 - again) * shape.n_shared_experts * (shape.moe_intermediate_size or 0)
        )
    experts = _expert_bytes(shape, tokens, tensor, itemsize, again) if moe else 0.0
    return LayerActivations(
        norms=(2 if again else 4) * outside,
        attention=unit * _attention_elements(shape, tensor, again),
        statistics=FP32 * tokens * shape.num_attention_heads / tensor,
        mlp=unit * inner / tensor,
        experts=experts,
    )


def _attention_elements(shape: ModelShape, tensor: int, again: bool) -> float:
    """Queries, keys, values and the output, of one token on one rank."""
    heads = shape.num_attention_heads
    if isinstance(shape, LatentShape):
        ranks = shape.q_lora_rank + shape.kv_lora_rank
        if again:
            kept = heads * shape.v_head_dim / tensor
            return kept + ranks + shape.qk_rope_head_dim
        keys = shape.head_dim + shape.qk_rope_head_dim
        cut = heads * (2 * keys + 2 * shape.v_head_dim) / tensor
        # Before and after the norm of each rank, whole on every tensor rank.
        return cut + 2 * ranks + shape.qk_rope_head_dim
    key_heads = max(shape.num_key_value_heads / tensor, 1)
    return 2 * shape.head_dim * (heads / tensor + key_heads)


def _expert_bytes(
    shape: ModelShape, tokens: int, tensor: int, itemsize: int, again: bool
) -> float:
    """Of routed experts under even routing: as many copies arrive as leave."""
    copies = tokens * shape.num_experts_per_tok
    inner = (3 - again) * (shape.moe_intermediate_size or 0) / tensor
    scores = 2 * FP32 * tokens * shape.num_local_experts
    return copies * (2 * shape.hidden_size + inner) * itemsize + scores
