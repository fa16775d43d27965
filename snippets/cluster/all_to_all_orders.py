# python snippets/cluster/all_to_all_orders.py
import torch
import torch.distributed as dist

from xtrain.cluster import VirtualCluster, dgx_h100
from xtrain.comm import all_to_all_single

NODES, PIECE = 4, 2**16  # numbers from each rank to each other


def in_a_loop(taken, given, first):
    """One send after the other; all receives are posted before."""
    rank, size = dist.get_rank(), dist.get_world_size()
    peers = [(first + step) % size for step in range(size)]
    peers.remove(rank)
    receives = [dist.irecv(taken[peer], peer) for peer in peers]
    for peer in peers:
        dist.send(given[peer], peer)
    for receive in receives:
        receive.wait()


def exchange(rank, size, order):
    given = torch.arange(size).float()[:, None] * size + rank  # for whom, from whom
    given = given.expand(size, PIECE).contiguous()
    taken = torch.empty_like(given)
    if order == "all at once":
        all_to_all_single(taken, given)
    else:
        in_a_loop(taken, given, first=0 if order == "rank 0 first" else rank)
    taken[rank] = given[rank]
    return taken[:, 0].tolist() == [rank * size + source for source in range(size)]


for order in ("rank 0 first", "next rank first", "all at once"):
    cluster = VirtualCluster(8 * NODES, dgx_h100(NODES), record=True)
    right = all(cluster.run(exchange, order))
    seconds, links = cluster.record.makespan, cluster.record.links
    load = max(use.bytes / use.bandwidth for use in links.values()) / seconds
    print(
        f"{order:15}: right {right}, {1e6 * seconds:6.1f} us, busiest link {load:4.0%}"
    )
