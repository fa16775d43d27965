"""One kind of message or collective of a step: its bytes, its link and its seconds.

Bytes follow the dtype of what travels: gradients that are summed in fp32 take twice the
bytes of 16-bit ones. The link follows from how far apart the ranks are in the mesh:

    inside a node    NVLink, for groups that fit into `gpus_per_node` devices
    between nodes    the network; a ring uses the adapters of all its ranks in a node,
                     a message or an all-to-all that of its own rank

The mesh is written outermost axis first (pipeline, data, context, tensor), so ranks of
an axis stand as far apart as all axes inside of it are large.

Sources: Rajbhandari et al., ZeRO, 2020, section 7; Megatron-LM's distributed optimizer;
torch's FSDP2 (param_dtype and reduce_dtype); the alpha-beta model of
`xtrain.plan.cost`.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

from xtrain.plan.checks import require_one_of
from xtrain.plan.cost import Cost, collective_cost
from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import Layout
from xtrain.plan.nccl import nccl_hop_seconds

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


DTYPES: dict[str, TransferDtypes] = {
    dtypes.name: dtypes
    for dtypes in (
        # Parameters stay fp32 under autocast, and so do the gradients that DDP sums.
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

    @property
    def sent(self) -> Fraction:
        """Bytes that a rank sends, on average over the group; in all its times."""
        return self.times * self.size * transfer_cost(self.algorithm, self.ranks).volume

    def seconds(self, alpha: float, beta: float) -> float:
        """All of them, one after the other: alpha s a message, beta s a byte."""
        cost = transfer_cost(self.algorithm, self.ranks)
        return self.times * cost.time(self.size, alpha, beta)


class Links:
    """alpha and beta between the ranks of a machine with several nodes.

    Args:
        device: with the link of a node and, for more than one node, the network.
        gpus_per_node: devices that the link joins.
        efficiency: share of a link's bandwidth that is reached.
    """

    def __init__(self, device: Accelerator, gpus_per_node: int, efficiency: float):
        self.device, self.gpus_per_node = device, gpus_per_node
        self.efficiency = efficiency
        self.known: dict[tuple[int, int, bool], tuple[float, float]] = {}

    def seconds(self, layout: Layout, transfer: Transfer) -> float:
        """Of a transfer, on the link of its axis."""
        stride = 1
        if transfer.axis == "context":
            stride = layout.tensor
        elif transfer.axis in ("expert", "data"):
            stride = layout.tensor * layout.context
        elif transfer.axis == "expert_data":
            stride = layout.tensor * layout.context * layout.expert
        ring = transfer.algorithm.startswith("ring")
        return transfer.seconds(*self.between(stride, transfer.ranks, ring))

    def between(self, stride: int, ranks: int, ring: bool) -> tuple[float, float]:
        """(alpha s, beta s a byte) among `ranks` ranks that stand `stride` apart."""
        key = stride, ranks, ring
        if key not in self.known:
            network = stride * ranks > self.gpus_per_node
            bandwidth = self.bandwidth(stride, ranks, ring, network)
            self.known[key] = nccl_hop_seconds(network), 1 / bandwidth
        return self.known[key]

    def bandwidth(self, stride: int, ranks: int, ring: bool, network: bool) -> float:
        """Bytes a second that a rank of the group sends."""
        inside = self.device.link.bandwidth
        if not network:
            return inside * self.efficiency
        if self.device.network is None:
            raise ValueError(
                f"{self.device.name} has no network here, and {ranks} ranks {stride} "
                f"apart do not fit into a node of gpus_per_node={self.gpus_per_node}"
            )
        rails = max(1, self.gpus_per_node // stride) if ring else 1
        return min(inside, rails * self.device.network.bandwidth) * self.efficiency
