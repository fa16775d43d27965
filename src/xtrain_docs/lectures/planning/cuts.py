"""What each parallelism cuts on its own, and what its traffic takes on each link."""

from xtrain.plan import (
    Accelerator,
    Layout,
    Link,
    ModelShape,
    memory_per_device,
    traffic_per_step,
)
from xtrain.plan.transfer import Transfer

from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import digits, number, si, value

GIB = 2**30
SEQUENCE, BATCH, RANKS = 8192, 16, 8
REPLICAS = 64
"""Data ranks of the table of ZeRO's stages."""
DENSE, EXPERTS = "llama-3-8b", "mixtral-8x7b"
ALONE: tuple[tuple[str, str, str, dict[str, int | bool]], ...] = (
    (DENSE, "nothing: one device", "–", {}),
    (DENSE, "the batch: data parallelism", "gradients", {"data": RANKS}),
    (DENSE, "and the optimizer's state: ZeRO-1", "gradients, weights",
     {"data": RANKS, "zero": 1}),
    (DENSE, "and all states: ZeRO-3", "gradients, weights twice",
     {"data": RANKS, "zero": 3}),
    (DENSE, "each layer: tensor parallelism, with slices of the sequence",
     "activations", {"tensor": RANKS, "sequence_parallel": True}),
    (DENSE, "the layers: a 1F1B pipeline", "activations at the seams",
     {"pipeline": RANKS}),
    (DENSE, "the sequence: context parallelism", "keys and values, gradients",
     {"context": RANKS}),
    (EXPERTS, "the batch alone: data parallelism", "gradients", {"data": RANKS}),
    (EXPERTS, "the experts, too: expert parallelism", "copies of tokens, gradients",
     {"data": RANKS, "expert": RANKS}),
)  # fmt: skip
WAITS = {"tensor": "waits for most of it", "context": "overlapped block by block",
         "pipeline": "waits where a stage has nothing else",
         "data": "overlapped with backward",
    "expert_data": "overlapped with backward",
         "expert": "waits, unless two micro-batches share the time"}  # fmt: skip


def alone(sizes: dict[str, int | bool]) -> Layout:
    """The same batch on every layout."""
    data = int(sizes.get("data", 1))
    return Layout(**{"micro_batches": BATCH // data, **sizes})  # type: ignore[arg-type]


@TABLES
def what_each_cuts() -> Table:
    """One model, one batch, eight devices: each parallelism by itself."""
    rows = []
    for model, cut, travels, sizes in ALONE:
        shape, layout = ModelShape.preset(model), alone(sizes)
        held = memory_per_device(shape, layout, SEQUENCE)
        sent = sum(t.sent for t in traffic_per_step(shape, layout, SEQUENCE))
        rows.append(
            [f"`{model}`", cut, number(held.states / GIB),
             number((held.activations + held.logits) / GIB), travels,
             si(float(sent), "B") if sent else "–"]
        )  # fmt: skip
    header = ["model", "what is cut", "states, GiB", "activations, GiB", "what travels",
              "sent in a step"]  # fmt: skip
    return Table(header, rows, "llrrlr")


def in_company() -> tuple[ModelShape, Layout]:
    """A layout with every axis that a model with experts can have."""
    layout = Layout(tensor=4, context=2, pipeline=2, data=8, expert=8, zero=1,
                    sequence_parallel=True, micro_batches=32)  # fmt: skip
    return ModelShape.preset(EXPERTS), layout


@TABLES
def which_link() -> Table:
    """Traffic of a step by axis, and how long it takes inside and between nodes."""
    shape, layout = in_company()
    found: dict[str, list[Transfer]] = {}
    for transfer in traffic_per_step(shape, layout, SEQUENCE):
        found.setdefault(transfer.axis, []).append(transfer)
    device = Accelerator.preset("h100")
    inside, between = Link.preset("nvlink4"), Link.preset("infiniband-ndr")
    compute = shape.flops_per_token(SEQUENCE) * layout.batch * SEQUENCE
    seconds = compute / layout.gpus / device.flops
    rows = []
    for axis, transfers in sorted(found.items(), key=lambda one: -_sent(one[1])):
        sent = _sent(transfers)
        rows.append(
            [axis, si(sent, "B"), number(sum(t.times for t in transfers)),
             share(sent * inside.beta / seconds),
             share(sent * between.beta / seconds), WAITS[axis]]
        )  # fmt: skip
    header = ["axis", "sent in a step", "calls", "NVLink, of the compute",
              "InfiniBand, of the compute", "who waits"]  # fmt: skip
    return Table(header, rows, "lrrrrl")


def share(part: float) -> str:
    """Two digits of a percentage, be it large or small."""
    return f"{digits(100 * part, 2)} %"


def _sent(transfers: list[Transfer]) -> float:
    return float(sum(transfer.sent for transfer in transfers))


@value
def stage_sent(stage: int) -> float:
    """Bytes of a step with a stage of ZeRO alone."""
    layout = Layout(data=REPLICAS, zero=stage)
    return _sent(traffic_per_step(ModelShape.preset(DENSE), layout, SEQUENCE))


@value
def tokens_to_hide(stage: int, adapters: int = 1) -> float:
    """Tokens for which a device computes as long as a stage's bytes travel.

    Args:
        adapters: of a node that carry the ring; never faster than NVLink.
    """
    shape = ModelShape.preset(DENSE)
    device, link = Accelerator.preset("h100"), Link.preset("infiniband-ndr")
    rate = min(adapters * link.bandwidth, device.link.bandwidth)
    return stage_sent(stage) / rate / (shape.flops_per_token(SEQUENCE) / device.flops)


ADAPTERS = 1, 8
"""Links of a ring: of one device in a node, or of all."""


@value
def alone_sizes(name: str) -> int:
    """Sizes of the tables above: of one parallelism by itself, and of the stages."""
    return {
        "sequence": SEQUENCE,
        "batch": BATCH,
        "ranks": RANKS,
        "replicas": REPLICAS,
        "adapters": ADAPTERS[1],
    }[name]


@value
def company_size(name: str) -> int:
    """A field of the layout that has every axis, such as `tensor`."""
    found: int = getattr(in_company()[1], name)
    return found
