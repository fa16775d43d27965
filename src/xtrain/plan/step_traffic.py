"""Bytes that a device sends in a step, by parallelism and dtype of each transfer.

    axis       what                                       how often
    tensor     sums, or gathers and scatters              each layer and micro-batch
               gradients of norms and shared key heads    each step
    context    keys, values, and their gradients          each layer and micro-batch
    expert     copies of tokens, there and back           each such layer, micro-batch
    pipeline   activations forward, gradients back        each stage and micro-batch
    data       gradients; weights of ZeRO                 each step, or micro-batch

ZeRO 0 sums gradients. 1 scatters the sums and gathers the weights. 2 scatters after
every micro-batch, or at the end. 3 also gathers the weights in each forward and, unless
they were kept, in each backward.

Sources: Rajbhandari et al., ZeRO, 2020, section 7; Narayanan et al., 2021, section 3.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import prod

from xtrain.plan.context_parallel import context_bytes
from xtrain.plan.layout import PLACEMENTS, DeviceParameters, Layout, device_parameters
from xtrain.plan.published import LatentShape
from xtrain.plan.shapes import ModelShape
from xtrain.plan.tensor_parallel import (
    TensorParallelCall,
    layer_calls,
    partial_gradient_calls,
    tensor_parallel_calls,
)
from xtrain.plan.transfer import (
    SEND,
    Spans,
    Transfer,
    TransferDtypes,
    data_spans,
    dtypes_of,
    split_spans,
)


def traffic_per_step(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    *,
    rank: int = 0,
    dtypes: str | TransferDtypes = "megatron-bf16",
) -> list[Transfer]:
    """Everything that a device of pipeline rank `rank` sends in a step.

    Args:
        sequence: tokens of one sequence, before context ranks divide it.
        dtypes: a name of `DTYPES`, or your own.
    """
    sizes = dtypes_of(dtypes)
    held = device_parameters(shape, layout, rank)
    of_step = layout.micro_batches
    if PLACEMENTS.get(layout.schedule) == "mirror":
        of_step = -(-of_step // 2)  # each of its two stages sees half of them
    found = []
    for moe, count in ((False, held.dense_layers), (True, held.moe_layers)):
        found += [
            replace(transfer, times=transfer.times * count * of_step)
            for transfer in layer_transfers(shape, layout, sequence, sizes, moe)
            if count
        ]
    found += [
        replace(transfer, times=transfer.times * of_step)
        for transfer in edge_transfers(shape, layout, sequence, sizes, rank)
    ]
    found += partial_transfers(shape, layout, held, sizes, rank)
    found += pipeline_transfers(shape, layout, sequence, sizes, rank, of_step)
    found += shared_transfers(shape, layout, held, sizes)
    return found + data_transfers(held, layout, sizes)


def sent_by_axis(transfers: Sequence[Transfer]) -> dict[str, int]:
    """Bytes that a device sends over each axis, largest first."""
    total: Counter[str] = Counter()
    for transfer in transfers:
        total[transfer.axis] += round(transfer.sent)
    return dict(total.most_common())


# --------------------------------------------------------- of one micro-batch


def layer_transfers(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    sizes: TransferDtypes,
    moe: bool = False,
) -> list[Transfer]:
    """Of one layer and one micro-batch, forward and backward."""
    local = sequence // layout.context
    again = layout.recompute == "full"
    calls = layer_calls(
        shape, layout.micro_batch, local, layout.tensor,
        sequence_parallel=layout.sequence_parallel, recompute=again,
        itemsize=sizes.activation, residual=sizes.residual, experts=moe,
    )  # fmt: skip
    found = _tensor_transfers(calls) + _context_transfers(shape, layout, local, sizes)
    return found + (_expert_transfers(shape, layout, local, sizes) if moe else [])


def _tensor_transfers(calls: Sequence[TensorParallelCall]) -> list[Transfer]:
    """Equal calls of one layer together."""
    return [
        Transfer("tensor", call.part, call.algorithm, call.numel * call.itemsize,
                 call.ranks, times, call.backward, call.overlapped)
        for call, times in Counter(calls).items()
    ]  # fmt: skip


def _context_transfers(
    shape: ModelShape, layout: Layout, local: int, sizes: TransferDtypes
) -> list[Transfer]:
    ranks = layout.context
    if ranks == 1:
        return []
    width = shape.head_dim
    if isinstance(shape, LatentShape):  # keys and values differ in width
        width = (width + shape.qk_rope_head_dim + shape.v_head_dim) // 2
    forward, backward = context_bytes(
        layout.context_way, local, shape.num_attention_heads // layout.tensor,
        max(shape.num_key_value_heads // layout.tensor, 1), width, ranks,
        batch=layout.micro_batch, itemsize=sizes.activation,
    )  # fmt: skip
    ring = layout.context_way == "ring"
    hops = ranks if ring else ranks - 1  # gradients go all the way round
    again = 1 + (layout.recompute == "full")
    runs = [
        ("keys and values", forward, ranks - 1, False),
        *[("keys and values", forward, ranks - 1, True)] * again,
        ("gradients of keys and values", backward - forward, hops, True),
    ]
    if layout.context_way == "ulysses":
        runs = [("heads for tokens", forward, ranks - 1, False)]
        runs += [("heads for tokens", backward, ranks - 1, True)] * again
    return [
        Transfer("context", what, SEND, sent // hops, ranks, hops, back, ring)
        for what, sent, hops, back in runs
    ]


def _expert_transfers(
    shape: ModelShape, layout: Layout, local: int, sizes: TransferDtypes
) -> list[Transfer]:
    """Dispatch and combine; backward sends the gradient of each the other way."""
    if layout.expert == 1:
        return []
    top_k = shape.num_experts_per_tok
    copies = local * layout.micro_batch * top_k * shape.hidden_size
    if layout.folded:  # each tensor rank sends the copies of its own tokens
        copies = copies * layout.expert_cut // layout.tensor
    ways = [("dispatch", sizes.dispatch, False), ("combine", sizes.combine, False)]
    if layout.recompute == "full":
        ways += [(what, size, True) for what, size, _ in ways]
    ways += [("combine", sizes.combine, True), ("dispatch", sizes.combine, True)]
    return [
        Transfer("expert", what, "all_to_all", copies * size, layout.expert, 1, back,
                 copies=top_k)
        for what, size, back in ways
    ]  # fmt: skip


def edge_transfers(
    shape: ModelShape, layout: Layout, sequence: int, sizes: TransferDtypes, rank: int
) -> list[Transfer]:
    """What tensor ranks send for embedding, head and loss."""
    if layout.tensor == 1:
        return []
    stages = layout.stages_of(rank)
    parts: set[str] = {"embedding"} if 0 in stages else set()
    if layout.stages - 1 in stages:
        parts |= {"head", "cross-entropy"}
    if not parts:
        return []
    one = replace(shape, num_hidden_layers=1, first_k_dense_replace=0)
    calls = tensor_parallel_calls(
        one, layout.micro_batch, sequence // layout.context, layout.tensor,
        sequence_parallel=layout.sequence_parallel, itemsize=sizes.activation,
        residual=sizes.residual,
    )  # fmt: skip
    return _tensor_transfers([call for call in calls if call.part in parts])


def pipeline_transfers(
    shape: ModelShape,
    layout: Layout,
    sequence: int,
    sizes: TransferDtypes,
    rank: int,
    micro_batches: int,
) -> list[Transfer]:
    """Activations to the next stage and gradients to the one before, of all stages."""
    own = layout.stages_of(rank)
    mirror = PLACEMENTS.get(layout.schedule) == "mirror"
    forward = backward = 0
    for stage in own:
        here = () if mirror else own  # mirrored stages of a rank are not neighbours
        forward += stage < layout.stages - 1 and stage + 1 not in here
        backward += stage > 0 and stage - 1 not in here
    size = message_size(shape, layout, sequence, sizes)
    return [
        Transfer("pipeline", what, SEND, size, 2, count * micro_batches, back)
        for what, count, back in (
            ("activations", forward, False),
            ("gradients of activations", backward, True),
        )
        if count
    ]


def shared_transfers(
    shape: ModelShape, layout: Layout, held: DeviceParameters, sizes: TransferDtypes
) -> list[Transfer]:
    """Gradients of what two pipeline ranks hold: a tied table, or mirrored stages."""
    if layout.pipeline == 1:
        return []
    numel = 0
    if PLACEMENTS.get(layout.schedule) == "mirror":
        numel = held.total
    elif shape.tie_word_embeddings and bool(held.embedding) != bool(held.head):
        numel = -(-shape.vocab_size // layout.tensor) * shape.hidden_size
    if not numel:
        return []
    apart = ((layout.gpus // layout.pipeline, 2),)
    size = numel * sizes.gradient
    return [
        Transfer("pipeline", "shared gradients", "ring_all_reduce", size, 2, 1, True,
                 spans=apart)
    ]  # fmt: skip


def message_size(
    shape: ModelShape, layout: Layout, sequence: int, sizes: TransferDtypes
) -> int:
    """Bytes of one micro-batch's residual stream between two stages."""
    tokens = layout.micro_batch * sequence // layout.context
    share = layout.tensor if layout.sequence_parallel else 1
    return tokens * shape.hidden_size * sizes.residual // share


# ------------------------------------------------------------------- of a step


def partial_transfers(
    shape: ModelShape,
    layout: Layout,
    held: DeviceParameters,
    sizes: TransferDtypes,
    rank: int,
) -> list[Transfer]:
    """Gradients of which tensor ranks have parts: whole, or this rank's ZeRO shard."""
    calls = partial_gradient_calls(
        shape, held.dense_layers + held.moe_layers, layout.tensor,
        last_norm=layout.stages - 1 in layout.stages_of(rank),
        sequence_parallel=layout.sequence_parallel, itemsize=sizes.gradient,
    )  # fmt: skip
    shards = layout.shard_ranks if layout.zero else 1
    return [
        replace(transfer, size=-(-transfer.size // shards))
        for transfer in _tensor_transfers(calls)
    ]


def data_transfers(
    held: DeviceParameters, layout: Layout, sizes: TransferDtypes
) -> list[Transfer]:
    """Gradients and weights, of everything and of experts apart."""
    found = _reduction("data", held.dense, layout.shard_ranks, layout, sizes)
    if held.experts:
        shards = layout.expert_shard_ranks
        found += _reduction("expert_data", held.experts, shards, layout, sizes)
    return found


def _reduction(
    axis: str, numel: int, shards: int, layout: Layout, sizes: TransferDtypes
) -> list[Transfer]:
    """Over `shards` ranks as ZeRO does, then over the replicas of each shard."""
    gradients, weights = numel * sizes.gradient, numel * sizes.weight
    stage, count = layout.zero, layout.micro_batches
    spans = data_spans(layout, axis == "expert_data")
    replicas = prod(ranks for _, ranks in spans)
    near, far = split_spans(spans, shards)
    apart = len(spans) == 2 and spans[0][1] > 1  # folded experts have one span
    if not layout.shard_context and apart:
        near, far = spans[1:], spans[:1]  # shards over data, copies over context
        if layout.replicate > 1:
            near, copies = split_spans(near, shards)
            far += copies

    def reduced(
        kind: str, size: int, ranks: int, where: Spans, times: int = 1
    ) -> list[Transfer]:
        one = Transfer(axis, "gradients", kind, size, ranks, times, True, spans=where)
        return [one] if ranks > 1 else []

    if stage == 0:
        return reduced("ring_all_reduce", gradients, replicas, spans)
    found = []
    if shards > 1:
        kept = layout.reduce_at_end and not layout.reshard_after_forward
        gathers = [(count if stage == 3 and not kept else 1, False)]
        if stage == 3 and layout.reshard_after_forward:
            gathers.append((count, True))
        found = [
            Transfer(axis, "weights", "ring_all_gather", weights, shards, times, back,
                     spans=near)
            for times, back in gathers
        ]  # fmt: skip
        scatters = count if stage > 1 and not layout.reduce_at_end else 1
        found += reduced("ring_reduce_scatter", gradients, shards, near, scatters)
    if replicas > shards:  # context ranks, or copies of hybrid sharding
        part = -(-gradients // shards)
        found += reduced("ring_all_reduce", part, replicas // shards, far)
    return found
