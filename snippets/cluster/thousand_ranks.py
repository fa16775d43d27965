# python snippets/cluster/thousand_ranks.py
import torch

from xtrain.cluster import VirtualCluster, advance, flat
from xtrain.comm import tree_all_reduce


def program(rank, size):
    advance(1e-3)  # a millisecond of computing
    total = torch.full((1000,), float(rank))
    tree_all_reduce(total)
    return total[0].item()


cluster = VirtualCluster(1024, flat(latency=5e-6, bandwidth=50e9))
results = cluster.run(program)
print(f"{len(results)} ranks have {set(results)}; it is {sum(range(1024))}")
print(f"after {max(cluster.seconds) * 1e6:.1f} us")
