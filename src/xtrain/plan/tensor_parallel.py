"""What tensor parallelism sends: every collective of a forward and a backward pass.

    per layer         tensor parallel          with sequence parallelism
    forward           2 all-reduces            2 all-gathers, 2 reduce-scatters
    backward          2 all-reduces            4 all-gathers, 2 reduce-scatters

each of all B S H activations, so 8 (t-1)/t B S H elements a rank: a reduce-scatter and
an all-gather send what one all-reduce does. Two of the backward all-gathers bring back
what forward did not keep, which makes 10 (t-1)/t B S H with sequence parallelism, or 9
with experts: their copies are kept.

Outside the layers: the embedding sums (or scatters) its B S H once forward; the head
sums the gradient of its input once; cross-entropy sends three numbers a token, in fp32.
Under autocast the residual stream is in fp32, and so are the embedding's sum and what
goes into a router and its experts; all else has 16 bits.

Once a step, not for each micro-batch: the gradients of which ranks have parts, those of
norms on slices of the sequence and of key heads that several ranks hold.

Sources: Shoeybi et al., Megatron-LM, 2019; Korthikanti et al., Reducing Activation
Recomputation in Large Transformer Models, 2022; Narayanan et al., Efficient Large-Scale
Language Model Training on GPU Clusters, 2021, section 3.2 (the volume).

Shapes: B batch, S sequence, H hidden, K key heads, D head size, t ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from xtrain.plan.checks import require_positive, require_whole
from xtrain.plan.collective_traffic import collective_traffic
from xtrain.plan.cost import collective_time
from xtrain.plan.shapes import ModelShape
from xtrain.plan.traffic import FP32, Traffic

REDUCE, GATHER, SCATTER = "ring_all_reduce", "ring_all_gather", "ring_reduce_scatter"
EXCHANGE = "one_shot_all_reduce"  # each rank's gradient to every rank with that head


@dataclass(frozen=True, slots=True)
class TensorParallelCall:
    """One collective: where it stands, and the full tensor it is about.

    Attributes:
        part: "attention", "mlp", "embedding", "head", "cross-entropy" or "gradients".
        algorithm: a name of `collective_traffic`.
        numel: elements of the full tensor.
        itemsize: bytes of an element.
        ranks: that take part.
        overlapped: hidden behind a product.
    """

    part: str
    backward: bool
    algorithm: str
    numel: int
    itemsize: int
    ranks: int
    overlapped: bool = False

    @property
    def traffic(self) -> Traffic:
        """Bytes of each rank, exact."""
        counted = collective_traffic(self.algorithm, self.numel, self.ranks)
        return counted.bytes(self.itemsize)

    def seconds(self, alpha: float, beta: float) -> float:
        """Alpha-beta time: alpha s per message, beta s per byte."""
        nbytes = self.numel * self.itemsize
        return collective_time(self.algorithm, nbytes, self.ranks, alpha, beta)


def tensor_parallel_calls(
    shape: ModelShape,
    batch: int,
    sequence: int,
    ranks: int,
    *,
    sequence_parallel: bool = False,
    recompute: bool = False,
    itemsize: int = 2,
    residual: int | None = None,
    experts: bool = False,
) -> list[TensorParallelCall]:
    """All collectives of forward and backward of one micro-batch, on `ranks` ranks.

    Args:
        batch: sequences of the micro-batch, which all ranks of the group share.
        sequence_parallel: activations between the matrices are cut along the sequence.
        recompute: each layer's forward runs once more in backward.
        itemsize: bytes of an activation.
        residual: bytes of an element of the residual stream; `itemsize` unless given.
        experts: each layer has experts, whose input has the residual stream's dtype.

    Raises:
        ValueError: heads, inner size or vocabulary cannot be cut for these ranks, or
            the sequence where it is.
    """
    check_cut(shape, sequence, ranks, sequence_parallel)
    require_whole("batch", batch)
    if ranks == 1:
        return []
    whole = batch * sequence * shape.hidden_size
    into, out = (GATHER, SCATTER) if sequence_parallel else (None, REDUCE)
    residual = itemsize if residual is None else residual

    def call(
        part: str, backward: bool, algorithm: str, size: int = itemsize
    ) -> TensorParallelCall:
        """A collective of all activations."""
        return TensorParallelCall(part, backward, algorithm, whole, size, ranks)

    def block(
        part: str, entering: int = itemsize, kept: bool = False
    ) -> list[TensorParallelCall]:
        """From replicated (or split) through two matrices and back."""
        forward = [call(part, False, into, entering)] if into else []
        forward.append(call(part, False, out))
        again = [replace(one, backward=True) for one in forward if recompute]
        # Backward of each: an all-reduce forward needs none, one is that of the input.
        backward = [call(part, True, out, entering)]
        if into:  # the gradient of the output, and the input once more
            backward.append(call(part, True, into))
            if not kept:
                once_more = call(part, True, into, entering)
                backward.append(replace(once_more, overlapped=True))
        return forward + again + backward

    layer = block("attention")
    layer += block("mlp", residual, kept=True) if experts else block("mlp")
    calls = [call("embedding", False, out, residual)]
    calls += layer * shape.num_hidden_layers
    calls.append(call("head", True, out))
    if into:
        calls.append(call("embedding", True, into, residual))
        calls += [call("head", False, into), call("head", True, into)]
    largest, sums = (
        TensorParallelCall(
            "cross-entropy", False, REDUCE, count * batch * sequence, FP32, ranks
        )
        for count in (1, 2)
    )
    return [*calls, largest, sums]


def partial_gradient_calls(
    shape: ModelShape,
    layers: int,
    ranks: int,
    *,
    last_norm: bool = True,
    sequence_parallel: bool = False,
    itemsize: int = FP32,
) -> list[TensorParallelCall]:
    """Once a step: one sum of everything of which the same ranks have parts.

    Args:
        layers: that this rank holds.
        last_norm: whether it holds the norm before the head.
        itemsize: bytes of a gradient.
    """
    replicas = max(1, ranks // shape.num_key_value_heads)
    norms = (2 * layers + last_norm) * shape.hidden_size * sequence_parallel
    of_heads = 2 * layers * shape.head_dim * shape.qk_norm
    inputs = shape.hidden_size + shape.qkv_bias
    numel = dict.fromkeys((ranks, replicas), 0)
    numel[ranks] += norms + of_heads
    numel[replicas] += 2 * layers * shape.head_dim * inputs
    return [
        TensorParallelCall(
            "gradients", True, REDUCE if members == ranks else EXCHANGE, held, itemsize,
            members,
        )
        for members, held in numel.items()
        if held and members > 1
    ]  # fmt: skip


def check_cut(
    shape: ModelShape, sequence: int, ranks: int, sequence_parallel: bool
) -> None:
    """ValueError unless the model can be cut over `ranks` ranks."""
    require_whole("ranks", ranks)
    require_whole("sequence", sequence)
    names = ["num_attention_heads", "intermediate_size", "vocab_size"]
    lengths = {name: getattr(shape, name) for name in names}
    if sequence_parallel:
        lengths["sequence"] = sequence
    for name, length in lengths.items():
        if length % ranks:
            raise ValueError(f"{name}={length} is not divisible by {ranks} ranks")
    keys = shape.num_key_value_heads
    if keys % ranks and ranks % keys:
        raise ValueError(
            f"num_key_value_heads={keys} and {ranks} ranks: one must divide the other"
        )


def layer_calls(
    shape: ModelShape, batch: int, sequence: int, ranks: int, **options: Any
) -> list[TensorParallelCall]:
    """`tensor_parallel_calls` of one layer, without what stands outside the layers."""
    one = replace(shape, num_hidden_layers=1, first_k_dense_replace=0)
    calls = tensor_parallel_calls(one, batch, sequence, ranks, **options)
    return [call for call in calls if call.part in ("attention", "mlp")]


def bytes_sent(calls: Sequence[TensorParallelCall]) -> int:
    """By the busiest rank in all of them."""
    return sum(call.traffic.max_sent for call in calls)


def layer_flops(shape: ModelShape, batch: int, sequence: int) -> int:
    """FLOPs of forward and backward of the last layer, all ranks together; causal."""
    last = shape.num_hidden_layers - 1
    flops = shape.layer_flops_per_token(last, sequence, causal=True)
    return flops * batch * sequence


def layer_seconds(
    calls: Sequence[TensorParallelCall],
    flops: float,
    ranks: int,
    rate: float,
    alpha: float,
    bandwidth: float,
) -> tuple[float, float]:
    """Seconds to compute a layer's share, and to send what `calls` send.

    Args:
        flops: of the whole layer.
        rate: FLOP/s that a device reaches in matrix products.
        alpha: seconds per message.
        bandwidth: bytes per second of a link, one way.
    """
    for name, value in (("rate", rate), ("bandwidth", bandwidth)):
        require_positive(name, value)
    sending = sum(call.seconds(alpha, 1 / bandwidth) for call in calls)
    return flops / ranks / rate, sending


def tokens_where_equal(shape: ModelShape) -> float:
    """Tokens of a group's micro-batch at which TP sends as much as ZeRO stage 3.

    Both in elements of one layer: tensor parallelism sends 8 (n-1)/n T H, stage 3
    3 (n-1)/n P (two all-gathers of the weights, one reduce-scatter of the gradients).
    Fewer tokens: tensor parallelism sends less.
    """
    return 3 * shape.layer_parameters / (8 * shape.hidden_size)
