# python snippets/cluster/shared_uplink.py
import torch
import torch.distributed as dist

from xtrain.cluster import VirtualCluster, dgx_h100, fat_tree

BYTES = 1_000_000
NETWORKS = {
    "no switch between nodes": dgx_h100(2),
    "an uplink for 8 GPUs": fat_tree(2, leaf=1, oversubscription=4),
}


def to_partner(rank, size, senders):
    """The first GPUs of node 0 send to their partners in node 1."""
    tensor = torch.zeros(BYTES, dtype=torch.uint8)
    if rank < senders:
        dist.send(tensor, rank + 8)
    elif 8 <= rank < 8 + senders:
        dist.recv(tensor, rank - 8)


for name, network in NETWORKS.items():
    route = network.route(0, 8)
    bandwidth = min(network.bandwidth[link] for link in route.links)
    formula = route.latency + BYTES / bandwidth
    for senders in (1, 2, 8):
        cluster = VirtualCluster(16, network)
        cluster.run(to_partner, senders)
        print(
            f"{name:23} {senders} at once: {1e6 * max(cluster.seconds):5.1f} us, "
            f"alpha + n beta {1e6 * formula:4.1f} us"
        )
