"""Rules of thumb about one thing each: a link, a stage, a bubble, a micro-batch."""

from dataclasses import replace
from functools import lru_cache

from xtrain.plan import (
    Estimate,
    Layout,
    ModelShape,
    bubble_over_ideal,
    estimate,
    memory_per_device,
    traffic_per_step,
)

from ...values import value
from .choosing import (
    RESERVE,
    SEQUENCE,
    USABLE,
    example,
)
from .cuts import REPLICAS
from .rules import DEVICE, EXAMPLE, GIB

SMALL = "llama-3-8b"


@value
@lru_cache
def rule_estimate(layout: Layout, device: str = DEVICE, nodes: int = 8) -> Estimate:
    """The 70B model in one layout, stages 2 and 3 in a pipeline allowed."""
    assumed = {"gpus_per_node": nodes, "capacity": USABLE, "reserve": RESERVE,
               "sharded_pipeline": True}  # fmt: skip
    return estimate(ModelShape.preset(EXAMPLE), layout, device, SEQUENCE, **assumed)


@value
def rule_tensor_share(ranks: int, device: str = DEVICE, nodes: int = 8) -> float:
    """The share of a step of the 70B model in collectives of tensor ranks."""
    layout = Layout(tensor=ranks, pipeline=8, micro_batches=64, sequence_parallel=True)
    found = rule_estimate(layout, device, nodes)
    return found.parts["tensor"] / found.seconds


@value
def rule_volume(stage: int, batches: int, dtypes: str) -> float:
    """Bytes that a stage of ZeRO sends in a step, over those of plain DDP."""
    shape = ModelShape.preset(SMALL)
    layout = Layout(data=REPLICAS, micro_batches=batches)
    sent = [
        sum(t.sent for t in traffic_per_step(shape, one, SEQUENCE, dtypes=dtypes))
        for one in (replace(layout, zero=stage), layout)
    ]
    return float(sent[0] / sent[1])


@value
def rule_example(what: str, stage: int = 1) -> float:
    """Of TP8 PP2 DP4 with a stage: GiB, bytes sent, seconds, or a part's share."""
    found = rule_estimate(example(zero=stage))
    if what == "GiB":
        return found.memory.total / GIB
    if what == "sent":
        return sent_by_data_ranks(found.layout)
    if what == "seconds":
        return found.seconds
    return found.parts[what] / found.seconds


@value
def rule_bubble(
    ranks: int, batches: int, schedule: str = "one_f_one_b", chunks: int = 1
) -> float:
    """The bubble over the work, where forward and both backwards take as long."""
    return bubble_over_ideal(schedule, ranks, batches, chunks)


@value
def rule_batches_for(ranks: int, idle: float) -> int:
    """The fewest micro-batches for which the bubble of 1F1B is at most `idle`."""
    batches = 1
    while rule_bubble(ranks, batches) > idle + 1e-12:
        batches += 1
    return batches


@value
def sent_by_data_ranks(layout: Layout) -> float:
    """Bytes of gradients and weights that a device of the 70B model sends in a step."""
    sent = traffic_per_step(ModelShape.preset(EXAMPLE), layout, SEQUENCE)
    return float(sum(t.sent for t in sent if t.axis == "data"))


@value
def rule_sequence_parallel(what: str, ranks: int = 8) -> float:
    """Bytes of the 70B model with whole tokens between the matrices, over sliced ones.

    Args:
        what: "kept" for backward, or "sent" by the tensor ranks.
    """
    shape = ModelShape.preset(EXAMPLE)
    found = []
    for sliced in (False, True):
        layout = Layout(tensor=ranks, sequence_parallel=sliced)
        if what == "kept":
            found.append(memory_per_device(shape, layout, SEQUENCE).activations)
        else:
            sent = traffic_per_step(shape, layout, SEQUENCE)
            found.append(float(sum(t.sent for t in sent)))
    return found[0] / found[1]


@value
def rule_states(stage: int) -> float:
    """GiB of states that a stage of ZeRO holds at rest."""
    layout = Layout(data=REPLICAS, zero=stage)
    return memory_per_device(ModelShape.preset(SMALL), layout, SEQUENCE).states / GIB
