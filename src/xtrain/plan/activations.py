"""Bytes of activations that a layer keeps for backward, on one device.

    of a GPT layer, in units of s b h          tensor parallelism   and of the sequence
    inputs of two norms              4         4                    4 / t
    inputs of q, k, v and of the MLP 4         4                    4 / t
    masks of two dropouts            2         2                    2 / t
    between a column and a row      24         24 / t               24 / t
    scores: softmax, mask, dropout   5 a s/h   5 a s/h / t          5 a s/h / t

Elements of two bytes, dropout masks of one; a GELU layer four times as wide; scores are
kept, as they are without a fused attention. "selective" recomputes the scores, "full"
the whole layer from its input.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models, 2022, section 4 and table 2.

Symbols: s sequence, b batch, h hidden size, a heads, t tensor ranks.
"""

from fractions import Fraction

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
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute={recompute!r} is not one of {RECOMPUTE}")
    share = Fraction(1, tensor)
    outside = share if sequence_parallel else Fraction(1)
    unit = sequence * batch * hidden
    if recompute == "full":
        return float(2 * unit * outside)
    inside = Fraction(24)
    if recompute == "none":
        inside += Fraction(5 * heads * sequence, hidden)
    return float(unit * (10 * outside + inside * share))
