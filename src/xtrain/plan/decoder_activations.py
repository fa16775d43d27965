"""Bytes that our own decoder keeps for backward, operation by operation.

    a layer, of one token                      elements              bytes, divided by
    two norms: what comes in, and normalized   4 h                   wide         s
               one over the root mean square   2                     wide         s
    into q, k, v and into gate, up             2 h                   item         s
    queries, attention's output twice          3 a d                 item         t
    keys and values                            2 k d                 item         t
    log-sum-exp of attention                   a                     wide         t
    gate, up, silu(gate) and their product     4 f                   item         t
    cosines and sines of a position            d, once a sequence    wide         1

    the end, of one token
    last norm, and what the head reads         2 h + 1, h            wide, item   s
    probabilities of the loss                  V                     wide         t

`item` are the bytes of an activation, `wide` those of fp32 at least; t are tensor
ranks, and s is t with sequence parallelism, else 1. A framework with fused kernels
keeps less (`layer_activations`): nothing here is fused but attention, so silu(gate),
the normalized inputs and a second order of attention's output are kept as well.

What is measured in the tests is the bytes of all storages that autograd saves.

Symbols: h hidden size, a heads, k key heads, d head size, f inner size, V vocabulary.
"""

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
    hidden, heads = shape.hidden_size, shape.num_attention_heads
    norms = (4 * hidden + 2) * wide + 2 * hidden * itemsize
    key_heads = max(shape.num_key_value_heads, tensor)
    width = 3 * heads + 2 * key_heads
    inside = (width * shape.head_dim + 4 * shape.intermediate_size) * itemsize
    inside += heads * wide
    rotary = sequence * shape.head_dim * wide
    return tokens * (norms / outside + inside / tensor) + rotary


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
    norm = ((2 * hidden + 1) * wide + hidden * itemsize) / outside
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
