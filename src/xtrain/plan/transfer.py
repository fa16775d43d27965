"""One kind of message or collective of a step: its bytes, its link and its seconds.

Bytes follow the dtype of what travels: gradients that are summed in fp32 take twice the
bytes of 16-bit ones. The link follows from how far apart the ranks are in the mesh:

    inside a node    NVLink, for groups that fit into `gpus_per_node` devices
    between nodes    the network; a ring uses the adapters of all its ranks in a node,
                     a message that of its own rank
    an all-to-all    sends a token's copies for one node once, through its own adapter,
                     and hands them on inside the node

The mesh is written outermost axis first (pipeline, data, context, tensor), so ranks of
an axis stand as far apart as all axes inside of it are large. A group is a list of
spans: (ranks apart, how many), such as context inside of data.

Sources: Rajbhandari et al., ZeRO, 2020, section 7; Megatron-LM's distributed optimizer;
torch's FSDP2 (param_dtype and reduce_dtype); the alpha-beta model of
`xtrain.plan.cost`.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import gcd

from xtrain.plan.checks import require_one_of, require_whole
from xtrain.plan.cost import Cost, collective_cost
from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import Layout
from xtrain.plan.nccl import nccl_hop_seconds
from xtrain.plan.time_constants import FITTED, TimeConstants

SEND = "send"  # one message to one rank


@dataclass(frozen=True, slots=True)
class TransferDtypes:
    """Bytes of an element of what is sent."""

    name: str
    gradient: int
    """As gradients are summed over data ranks."""
    weight: int
    """As weights are gathered."""
    activation: int = 2
    dispatch: int = 2
    """Of a token's copy on its way to an expert."""
    combine: int = 2

    @property
    def residual(self) -> int:
        """Of the residual stream: rows of the embedding, in the dtype of weights, and
        what layers add to them. The sum has the wider dtype."""
        return max(self.weight, self.activation)


DTYPES: dict[str, TransferDtypes] = {
    dtypes.name: dtypes
    for dtypes in (
        # Parameters stay fp32 under autocast, and so do the gradients that DDP sums
        # and the residual stream.
        TransferDtypes("ddp-autocast", gradient=4, weight=4),
        # bf16 weights, gradients summed in fp32: the distributed optimizer.
        TransferDtypes("megatron-bf16", gradient=4, weight=2),
        # MixedPrecisionPolicy(param_dtype=bfloat16, reduce_dtype=float32).
        TransferDtypes("fsdp2", gradient=4, weight=2),
        # 16-bit gradients, as the ZeRO paper counts.
        TransferDtypes("zero16", gradient=2, weight=2),
        TransferDtypes("fp32", 4, 4, activation=4, dispatch=4, combine=4),
    )
}


def dtypes_of(dtypes: str | TransferDtypes) -> TransferDtypes:
    """The dtypes of that name; ValueError names those that are known."""
    if isinstance(dtypes, TransferDtypes):
        return dtypes
    require_one_of("dtypes", dtypes, DTYPES)
    return DTYPES[dtypes]


@lru_cache(maxsize=4096)
def transfer_cost(algorithm: str, ranks: int) -> Cost:
    """`collective_cost`, and one message for "send"."""
    if algorithm == SEND:
        return Cost(1, Fraction(1))
    return collective_cost(algorithm, ranks)


Spans = tuple[tuple[int, int], ...]
"""(ranks apart, how many of them), the nearest first."""


@dataclass(frozen=True, slots=True)
class Transfer:
    """One kind of collective or message, and how often a device takes part in it."""

    axis: str
    what: str
    algorithm: str
    size: int
    """Bytes of the full tensor, or of the message."""
    ranks: int
    times: int = 1
    backward: bool = False
    overlapped: bool = False
    """It can run under compute."""
    spans: Spans | None = None
    """Where its ranks stand; by the axis unless given."""
    copies: int = 1
    """Of a token, in an all-to-all."""

    @property
    def sent(self) -> Fraction:
        """Bytes that a rank sends, on average over the group; in all its times."""
        return self.times * self.size * transfer_cost(self.algorithm, self.ranks).volume

    def seconds(self, alpha: float, beta: float) -> float:
        """All of them, one after the other: alpha s a message, beta s a byte."""
        cost = transfer_cost(self.algorithm, self.ranks)
        return self.times * cost.time(self.size, alpha, beta)


class Links:
    """Seconds of transfers between the ranks of a machine with several nodes.

    Args:
        device: with the link of a node and, for more than one node, the network.
        gpus_per_node: devices that the link joins; the device's own number if None, or
            if it is that of one host of a rack.
    """

    def __init__(
        self,
        device: Accelerator,
        gpus_per_node: int | None = None,
        constants: TimeConstants = FITTED,
        network: float | None = None,
    ):
        if gpus_per_node is None or gpus_per_node == device.host:
            gpus_per_node = device.node
        require_whole("gpus_per_node", gpus_per_node)
        self.device, self.gpus_per_node = device, gpus_per_node
        self.constants = constants
        self.inside = device.link.bandwidth * device.links * constants.inside
        self.adapter = network
        if network is None and device.network is not None:
            self.adapter = device.network.bandwidth
        self.near, self.far = nccl_hop_seconds(False), nccl_hop_seconds(True)

    def nodes(self, spans: Spans) -> tuple[int, int]:
        """(nodes of a group, its ranks in one of them)."""
        ranks = local = 1
        for stride, count in spans:
            ranks *= count
            local *= min(count, max(1, self.gpus_per_node // stride))
        local = min(local, ranks)
        return -(-ranks // local), local

    def between(self, ranks: int) -> float:
        """Bytes a second of one adapter, as reached; ValueError without a network."""
        if self.adapter is None:
            raise ValueError(
                f"{self.device.name} has no network here, and a group of {ranks} ranks "
                f"does not fit into a node of gpus_per_node={self.gpus_per_node}"
            )
        return self.adapter * self.constants.between

    def seconds(self, layout: Layout, transfer: Transfer, calls: int = 1) -> float:
        """Of a transfer, cut into so many calls, in all its times."""
        spans = transfer.spans or spans_of(layout, transfer)
        nodes, local = self.nodes(spans)
        if transfer.algorithm == "all_to_all":
            return transfer.times * self.exchange(transfer, nodes, local)
        rate = self.inside
        if nodes > 1:
            rails = local if transfer.algorithm != SEND else 1
            rate = min(rate, rails * self.between(transfer.ranks))
        cost = transfer_cost(transfer.algorithm, transfer.ranks)
        wait = self.latency(transfer.algorithm, transfer.ranks, nodes)
        if nodes > 1:
            wait += self.constants.call
        size = transfer.size * float(cost.volume)
        return transfer.times * (calls * wait + size / rate)

    def latency(self, algorithm: str, ranks: int, nodes: int) -> float:
        """Seconds of the hops of a ring, or of a tree of an all-reduce with fewer."""
        messages = transfer_cost(algorithm, ranks).messages
        if messages <= 1:
            return messages * (self.far if nodes > 1 else self.near)
        rounds = messages / (ranks - 1)
        ring = (nodes - 1) * self.far + (ranks - nodes) * self.near
        if algorithm != "ring_all_reduce":
            return rounds * ring
        depth = (nodes - 1).bit_length() * self.far
        tree = depth + (-(-ranks // nodes) - 1) * self.near
        return rounds * min(ring, tree)

    def exchange(self, transfer: Transfer, nodes: int, local: int) -> float:
        """An all-to-all: what crosses, and what every device of a node hands on."""
        ranks = transfer.ranks
        inside = transfer.size * (ranks - 1) / ranks / self.inside
        if nodes == 1:
            return inside + self.near * min(ranks - 1, 8)
        once = once_to_a_node(transfer.copies, nodes) / transfer.copies
        crossing = transfer.size * once * (nodes - 1) / nodes
        crossing /= self.between(ranks)
        calls = self.far * min(nodes - 1, 8) + self.constants.call
        return max(inside, crossing) + calls


def once_to_a_node(copies: int, nodes: int) -> float:
    """Nodes that the experts of a token lie on, if each may lie on any."""
    return float(nodes * (1 - (1 - 1 / nodes) ** copies))


def spans_of(layout: Layout, transfer: Transfer) -> Spans:
    """Where the ranks of an axis stand; gradients and weights bring their own."""
    inner = layout.tensor * layout.context
    ranks = transfer.ranks
    if transfer.axis == "context":
        return ((layout.tensor, ranks),)
    if transfer.axis == "expert":
        return ((layout.expert_cut if layout.folded else inner, ranks),)
    if transfer.axis == "pipeline":
        return ((layout.gpus // layout.pipeline, ranks),)
    return ((1, ranks),)


def data_spans(layout: Layout, experts: bool) -> Spans:
    """All ranks that hold the same parameters: context inside of data."""
    tensor, context = layout.tensor, layout.context
    if experts and layout.folded:
        inner = layout.expert_cut * layout.expert
        return ((inner, layout.expert_replicas),)
    apart = tensor * context * (layout.expert if experts else 1)
    return ((tensor, context), (apart, layout.expert_data if experts else layout.data))


def split_spans(spans: Spans, inner: int) -> tuple[Spans, Spans]:
    """The `inner` nearest ranks of a group, and as many groups of them as there are."""
    near, far = [], []
    for stride, count in spans:
        taken = gcd(inner, count)
        inner //= taken
        near.append((stride, taken))
        far.append((stride * taken, count // taken))
    return tuple(near), tuple(far)
