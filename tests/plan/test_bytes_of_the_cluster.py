"""Bytes of the plan against what the ranks of a model send in a step, to the last one.

Nothing is rounded and nothing is small enough to be left out: what a step sends besides
is written down in `besides`, in closed form, by who sends it and why.
"""

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest

from tests.plan.cluster_step import GRADIENTS, bytes_of_a_step
from xtrain.model import XtrainConfig
from xtrain.plan import Layout, device_parameters, traffic_per_step
from xtrain.plan.layout import PLACEMENTS
from xtrain.plan.layout_rules import broken_rules, padded_vocabulary
from xtrain.train.layouts import axes_of
from xtrain.train.traffic import transfer_dtypes

DENSE = XtrainConfig(
    vocab_size=50, hidden_size=28, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=6,
)  # fmt: skip
# Every token goes to all experts, so that as many rows are sent as by even routing.
EXPERTS = replace(
    DENSE, num_local_experts=4, num_experts_per_tok=4, moe_intermediate_size=10,
    first_k_dense_replace=1,
)  # fmt: skip
SHARED = replace(EXPERTS, n_shared_experts=1)
TIED = replace(DENSE, tie_word_embeddings=True)
QWEN = replace(DENSE, qkv_bias=True, qk_norm=True)
SEQUENCE, FLOAT, LONG, DOUBLE = 24, 4, 8, 8


def case(shape: XtrainConfig, **sizes: Any) -> Any:
    """A layout, named by what is not its default."""
    name = " ".join(f"{name}={size}" for name, size in sizes.items())
    kind = "experts" if shape.num_local_experts else "dense"
    kind = "shared" if shape.n_shared_experts else kind
    kind = "qwen" if shape.qk_norm else kind
    return pytest.param(shape, Layout(**sizes), id=f"{kind} {name}")


CASES = [
    case(DENSE, data=2),
    case(DENSE, data=3, micro_batches=2),
    case(DENSE, data=3, zero=1, micro_batches=2),
    case(DENSE, data=4, zero=2, micro_batches=2),
    case(DENSE, data=3, zero=3, micro_batches=2),
    case(DENSE, data=2, zero=3, reshard_after_forward=False),
    case(DENSE, tensor=2, micro_batch=2, micro_batches=2),
    case(DENSE, tensor=4, sequence_parallel=True),
    case(DENSE, tensor=8, sequence_parallel=True),
    case(QWEN, tensor=2, micro_batches=2),
    case(QWEN, tensor=8, sequence_parallel=True),
    case(DENSE, pipeline=3, micro_batches=4),
    case(DENSE, pipeline=2, schedule="interleaved", chunks=2, micro_batches=4),
    case(DENSE, pipeline=2, schedule="zb_v", chunks=2, micro_batches=3),
    case(DENSE, context=2),
    case(DENSE, context=3, micro_batch=2),
    case(DENSE, context=4, context_way="all_gather"),
    case(DENSE, context=2, context_way="ulysses"),
    case(EXPERTS, data=2, expert=2, micro_batches=2),
    case(EXPERTS, data=4, expert=4),
    case(EXPERTS, data=4, expert=2, zero=1),
    case(EXPERTS, data=2, expert=2, tensor=2),
    case(EXPERTS, data=2, expert=2, pipeline=2, micro_batches=2, recompute="full"),
    case(DENSE, data=2, tensor=2, zero=3, sequence_parallel=True),
    case(DENSE, tensor=2, sequence_parallel=True, recompute="full"),
    case(DENSE, data=2, pipeline=2, micro_batches=4, zero=1),
    case(DENSE, data=2, context=2, zero=2),
    case(DENSE, data=2, context=2, tensor=2, zero=1),
    case(DENSE, tensor=2, pipeline=2, micro_batches=2, recompute="full"),
    case(DENSE, context=2, tensor=2, pipeline=2, micro_batches=2, recompute="full",
         sequence_parallel=True),
    case(DENSE, data=2, tensor=2, pipeline=2, schedule="interleaved", chunks=2,
         micro_batches=2, sequence_parallel=True),
    case(DENSE, data=2, context=2),
    case(EXPERTS, data=4, expert=2),
    case(DENSE, tensor=4, sequence_parallel=True, zero=1, data=2, micro_batches=2),
    case(EXPERTS, data=2, expert=2, tensor=2, sequence_parallel=True),
    case(EXPERTS, tensor=2, sequence_parallel=True, recompute="full", micro_batches=2),
    case(SHARED, data=2, expert=2, tensor=2),
    case(SHARED, data=2, expert=2, tensor=2, sequence_parallel=True, micro_batch=2),
    case(TIED, pipeline=2, micro_batches=2),
    case(TIED, pipeline=3, data=2, micro_batches=2),
    case(DENSE, pipeline=2, schedule="dualpipe", micro_batches=4),
    case(DENSE, pipeline=2, data=2, schedule="dualpipe", micro_batches=4),
    case(DENSE, pipeline=2, data=2, schedule="chimera", micro_batches=4),
    case(DENSE, pipeline=2, context=2, schedule="dualpipe_v", chunks=2,
         micro_batches=4),
    case(DENSE, pipeline=2, tensor=2, schedule="zb_h1", micro_batches=2),
    case(DENSE, pipeline=2, schedule="gpipe", micro_batches=2),
    case(EXPERTS, data=2, expert=2, tensor=2, recompute="full", micro_batches=2),
    case(EXPERTS, data=2, expert=2, pipeline=2, schedule="dualpipe_v", chunks=2,
         micro_batches=4),
    case(SHARED, data=2, expert=2, tensor=2, pipeline=2, schedule="dualpipe",
         micro_batches=4),
    case(DENSE, data=2, zero=3, pipeline=2, context=2, micro_batches=2,
         reduce_at_end=True),
    case(DENSE, data=3, zero=3, pipeline=2, micro_batches=3, reduce_at_end=True,
         reshard_after_forward=False),
]  # fmt: skip


def planned(shape: XtrainConfig, layout: Layout, dtype: str) -> Counter[str]:
    """Of all ranks together, by axis; gradients and weights of all kinds in one."""
    found: dict[str, Fraction] = {}
    sizes = transfer_dtypes(dtype)
    for rank in range(layout.pipeline):
        for one in traffic_per_step(shape, layout, SEQUENCE, rank=rank, dtypes=sizes):
            axis = GRADIENTS if one.axis in ("data", "expert_data") else one.axis
            alike = layout.gpus // layout.pipeline
            found[axis] = found.get(axis, Fraction(0)) + alike * one.sent
    assert all(size.denominator == 1 for size in found.values())
    return Counter({axis: int(size) for axis, size in found.items()})


def besides(shape: XtrainConfig, layout: Layout) -> Counter[str]:
    """What a step sends that is not in the plan, of all ranks together."""
    more: Counter[str] = Counter()
    axes, count = axes_of(layout), layout.micro_batches
    batch, context, tensor = layout.data, layout.context, layout.tensor
    alike, again = layout.gpus // layout.pipeline, 1 + (layout.recompute == "full")
    twice = PLACEMENTS.get(layout.schedule) == "mirror"  # stages on two ranks
    local = SEQUENCE // context * layout.micro_batch
    moe_layers = sum(map(shape.is_moe, range(shape.num_hidden_layers)))

    def sums(size: int, nbytes: int) -> int:
        """All-reduces in all groups of an axis of this size, of one pipeline rank."""
        return 2 * (size - 1) * nbytes * alike // size

    def tables(size: int, numbers: int) -> int:
        """Rank 0 of each group takes the numbers of all others, and sends them all."""
        return (size - 1) * (1 + size) * numbers * DOUBLE * layout.gpus // size

    if layout.pipeline == 1:
        pair = 2 * LONG  # how many labels, and is a batch wrong
        more["tensor"] += count * sums(tensor, pair)
        for size in (batch, context):  # and the loss
            more[GRADIENTS] += count * sums(size, pair + FLOAT)
        more[GRADIENTS] += sums(batch, count * DOUBLE)  # labels of each micro-batch
    else:  # may the step begin, with which shapes; loss, labels, has a rank failed
        more["pipeline"] += 2 * tables(layout.pipeline, 4)
        more[GRADIENTS] += tables(batch, 1) + tables(batch, 4)
        more[GRADIENTS] += count * sums(context, FLOAT)
        # A byte for each tensor of gradients that two ranks sum, from each of them.
        of_experts = 1 + 3 * (shape.n_shared_experts > 0)  # more than in other layers
        tensors = 9 * shape.num_hidden_layers + of_experts * moe_layers + 3
        tensors *= twice
        tensors += shape.tie_word_embeddings
        more["pipeline"] += 2 * alike * tensors
    # Each attention and each exchange of experts: do all ranks make the same call?
    moe, digest = again * count * moe_layers, 3 * LONG
    attentions = again * count * shape.num_hidden_layers
    more[GRADIENTS] += attentions * sums(context, digest)
    more[GRADIENTS] += moe * sums(layout.expert, digest)
    # How many rows come for each expert.
    rows = (layout.expert - 1) * shape.num_local_experts * LONG
    more["expert"] += moe * rows * alike // layout.expert
    bare = layout.context > 1 or layout.expert > 1
    if layout.zero == 0 and not bare:  # DDP of each stage: had all a gradient
        replicas = axes.get("data") or axes["expert_data"]
        modules = layout.stages * (1 + twice)
        more[GRADIENTS] += modules * sums(replicas, FLOAT)
    # Gradients of gates: each tensor rank has those of its slices of the experts.
    gates = local * shape.num_experts_per_tok * FLOAT
    more["tensor"] += count * moe_layers * sums(tensor, gates)
    more.update(padding(shape, layout))
    return more


def padding(shape: XtrainConfig, layout: Layout) -> Counter[str]:
    """Zeros behind the shards of ZeRO, less the later gathers of FSDP's root.

    Flat tensors are padded to a multiple of the ranks; embedding, norm and head, which
    no layer holds, stay whole from forward to backward, in a pipeline to the end.
    """
    more: Counter[str] = Counter()
    axes, count = axes_of(layout), layout.micro_batches
    shards = axes.get("data") or axes["expert_data"]
    if layout.zero == 0 or shards == 1:
        return more
    at_end = layout.zero == 1 or layout.reduce_at_end
    scatters, gathers, of_root = 1 if at_end else count, 1, count
    if layout.pipeline > 1:
        of_root = 1
    if layout.zero == 3:
        forwards = 1 if at_end and not layout.reshard_after_forward else count
        gathers = forwards + count * layout.reshard_after_forward
    groups = layout.gpus // layout.pipeline // shards
    for rank in range(layout.pipeline):
        held = device_parameters(shape, layout, rank)
        flats = [(held.total, gathers + scatters)]
        if layout.zero == 3:
            blocks = [(held.block, gathers + scatters)] * held.dense_layers
            flats = [*blocks, (held.root, of_root + scatters)]
            left = (gathers - of_root) * held.root
            more[GRADIENTS] -= left * FLOAT * (shards - 1) * groups
        zeros = sum(-numel % shards * times for numel, times in flats)
        more[GRADIENTS] += zeros * FLOAT * (shards - 1) * groups
    return more


def shape_for(shape: XtrainConfig, layout: Layout) -> XtrainConfig:
    """With a vocabulary that its tensor ranks can cut: 50 is padded to 52 and 56."""
    rows = padded_vocabulary(shape.vocab_size, layout.tensor, multiple=1)
    return replace(shape, vocab_size=rows)


@pytest.mark.verifies(
    "xtrain.plan.step_traffic:traffic_per_step",
    "xtrain.plan.step_traffic:layer_transfers",
    "xtrain.plan.step_traffic:edge_transfers",
    "xtrain.plan.step_traffic:pipeline_transfers",
    "xtrain.plan.step_traffic:message_size",
    "xtrain.plan.step_traffic:data_transfers",
    "xtrain.train.traffic:transfer_dtypes",
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "layout"), CASES)
def test_a_step_sends_what_is_planned(
    shape: XtrainConfig, layout: Layout, dtype: str
) -> None:
    shape = shape_for(shape, layout)
    assert broken_rules(shape, layout, SEQUENCE) == []
    expected = planned(shape, layout, dtype)
    expected.update(besides(shape, layout))
    autocast = dtype == "bfloat16"
    assert bytes_of_a_step(shape, layout, SEQUENCE, autocast) == +expected
