"""The link between ranks of a layout, by how far apart they stand in the mesh.

    inside a node    NVLink, for groups that fit into `gpus_per_node` devices
    between nodes    the network; a ring uses the adapters of all its ranks in a node,
                     a message or an all-to-all that of its own rank

The mesh is written outermost axis first (pipeline, data, context, tensor), so ranks of
an axis stand as far apart as all axes inside of it are large.

Source: the alpha-beta model of `xtrain.plan.cost`.
"""

from xtrain.plan.hardware import Accelerator
from xtrain.plan.layout import Layout
from xtrain.plan.nccl import nccl_hop_seconds
from xtrain.plan.transfer import Transfer


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
