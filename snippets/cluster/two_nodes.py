# python snippets/cluster/two_nodes.py
import torch
import torch.distributed as dist

from xtrain.cluster import Deadlock, VirtualCluster, dgx_h100

NODE = 8  # ranks


def sum_over_nodes(rank, size, in_order):
    """A sum in each node, between the first ranks of the nodes, and back."""
    first, nodes = rank - rank % NODE, size // NODE
    members = [range(n * NODE, (n + 1) * NODE) for n in range(nodes)]
    node = [dist.new_group(ranks) for ranks in members][rank // NODE]
    total = torch.ones(1_000_000)
    dist.all_reduce(total, group=node)
    if rank == first and nodes == 2:
        other, theirs = NODE - first, torch.empty_like(total)
        if in_order and first > 0:
            dist.recv(theirs, other)
            dist.send(total, other)
        else:
            dist.send(total, other)  # returns when the other rank receives
            dist.recv(theirs, other)
        total += theirs
    dist.broadcast(total, first, node)
    return int(total[0])


if __name__ == "__main__":
    for nodes, in_order in ((1, False), (2, False), (2, True)):
        cluster = VirtualCluster(NODE * nodes, dgx_h100(nodes))
        order = "in order" if in_order else "all send first"
        print(f"{nodes} x {NODE} ranks, {order}:")
        try:
            sums = cluster.run(sum_over_nodes, in_order)
            print(f"  {set(sums)} after {max(cluster.seconds) * 1e6:.1f} us")
        except Deadlock as error:
            print(f"  ranks {error.cycle} wait for each other:")
            lines = str(error).splitlines()
            print(*[line for line in lines if "send(" in line][-2:], sep="\n")
