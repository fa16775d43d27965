"""Bytes that our own decoder keeps for backward, operation by operation.

    a layer, of one token                      elements              bytes, divided by
    as counted by `layer_activations`          4 h + 2 a d + 2 k d   item         s, t
                                               + 3 f
    log-sum-exp of attention                   a                     fp32         t
    two norms: one over the root mean square   2                     wide         s
    cosines and sines of a position            d, once a sequence    wide         1

    the end, of one token
    last norm, and what the head reads         h + 1 wide, h         item         s
    probabilities of the loss                  V                     wide         t

`item` are the bytes of an activation, `wide` those of fp32 at least; t are tensor
ranks, and s is t with sequence parallelism, else 1. What stands between the matrices
has its backward written by hand, on a CPU the norms as well: normalized inputs and
silu(gate) are computed again.

What is measured in the tests is the bytes of all storages that autograd saves.

Symbols: h hidden size, a heads, k key heads, d head size, f inner size, V vocabulary.
"""

from xtrain.plan.activations import layer_activations
from xtrain.plan.checks import require_whole
from xtrain.plan.shapes import ModelShape

FP32 = 4


def decoder_layer_activations(
    shape: ModelShape,
    batch: int,
    sequence: int,
    *,
    itemsize: int = FP32,
    tensor: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that one dense layer of an `XtrainModel` keeps on a rank.

    `batch` are the sequences of this rank; with `sequence_parallel` the tensor ranks
    share the sequence outside the matrices, too.
    """
    tokens, wide, outside = _units(batch, sequence, itemsize, tensor, sequence_parallel)
    if shape.num_local_experts:
        raise ValueError(
            f"num_local_experts={shape.num_local_experts}: only dense layers count"
        )
    cut = {"tensor": tensor, "sequence_parallel": sequence_parallel}
    kept = layer_activations(shape, tokens, itemsize=itemsize, **cut)  # type: ignore[arg-type]
    rotary = sequence * shape.head_dim * wide
    return kept.total + 2 * tokens * wide / outside + rotary


def decoder_activations(
    shape: ModelShape,
    batch: int,
    sequence: int,
    *,
    itemsize: int = FP32,
    tensor: int = 1,
    sequence_parallel: bool = False,
) -> float:
    """Bytes that a whole `XtrainModel` keeps between forward and backward of a loss.

    Arguments are those of `decoder_layer_activations`.
    """
    cut = {"tensor": tensor, "sequence_parallel": sequence_parallel}
    layer = decoder_layer_activations(
        shape,
        batch,
        sequence,
        itemsize=itemsize,
        **cut,  # type: ignore[arg-type]
    )
    tokens, wide, outside = _units(batch, sequence, itemsize, tensor, sequence_parallel)
    hidden = shape.hidden_size
    norm = (wide + 2 * hidden * itemsize) / outside
    end = tokens * (norm + shape.vocab_size * wide / tensor)
    return shape.num_hidden_layers * layer + end


def decoder_peak(
    shape: ModelShape, batch: int, sequence: int, *, itemsize: int = FP32
) -> float:
    """Bytes at the fullest moment of a step of Adam on one device, without masters.

    That is the start of backward, when all activations are there and the logits'
    gradient is computed, or the end of it, when all gradients are.
    """
    states = shape.parameters * itemsize * 3  # weights, and two moments
    kept = decoder_activations(shape, batch, sequence, itemsize=itemsize)
    logits = 2 * batch * sequence * shape.vocab_size * max(itemsize, FP32)
    gradients = shape.parameters * itemsize
    return states + max(kept + logits, gradients)


def _units(
    batch: int, sequence: int, itemsize: int, tensor: int, sequence_parallel: bool
) -> tuple[int, int, int]:
    """Tokens, bytes of what is kept wide, and what divides outside the matrices."""
    for name, size in (
        ("batch", batch),
        ("sequence", sequence),
        ("itemsize", itemsize),
        ("tensor", tensor),
    ):
        require_whole(name, size)
    return batch * sequence, max(itemsize, FP32), tensor if sequence_parallel else 1
