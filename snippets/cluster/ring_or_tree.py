# python snippets/cluster/ring_or_tree.py
import torch

from xtrain.cluster import VirtualCluster, flat
from xtrain.comm import ring_all_reduce, tree_all_reduce
from xtrain.plan import collective_time

ALPHA, BANDWIDTH = 5e-6, 50e9  # seconds for a message, bytes a second


def norm_of_all(rank, size, all_reduce):
    """The norm of a gradient in shards: one number from each rank."""
    squares = torch.ones(1)
    all_reduce(squares)
    return float(squares.sqrt())


for ranks in (8, 64, 256):
    for all_reduce in (ring_all_reduce, tree_all_reduce):
        cluster = VirtualCluster(ranks, flat(ALPHA, BANDWIDTH), checks=False)
        (norm,) = set(cluster.run(norm_of_all, all_reduce))
        name = all_reduce.__name__
        formula = collective_time(name, 4, ranks, ALPHA, 1 / BANDWIDTH)
        print(
            f"{ranks:3} ranks, {name:16} norm {norm:7.4f} after "
            f"{1e6 * max(cluster.seconds):6.0f} us, formula {1e6 * formula:6.0f} us"
        )
