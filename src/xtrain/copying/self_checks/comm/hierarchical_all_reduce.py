"""The sum over two nodes of two ranks is the one of a single process."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.hierarchical_all_reduce import hierarchical_all_reduce


def check(rank: int, size: int) -> None:
    nodes = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    peers = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    inputs = [randn(1000, seed=r) for r in range(size)]
    tensor = inputs[rank].clone()
    with Sent() as sent:
        hierarchical_all_reduce(tensor, nodes[rank // 2], peers[rank % 2])
    same("the sum of 4 tensors of 1,000 numbers", tensor, torch.stack(inputs).sum(0))
    inside, between = 2 * (2 - 1) / 2, 2 * (2 - 1) / 2 * 1 / 2
    formula = "2(G-1)/G + 2(K-1)/K * 1/G of 4,000 bytes"
    sends(sent, formula, (inside + between) * tensor.nbytes)
