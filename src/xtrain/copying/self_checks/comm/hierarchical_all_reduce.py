"""The sum over nodes of two ranks is the one of a single process."""

from functools import partial
from typing import Any

import torch.distributed as dist

from xtrain.copying.self_checks.comm.sums import check_sum

SIZES = (2, 4, 8)


def check(form: Any, rank: int, size: int) -> None:
    count, ranks = size // 2, list(range(size))  # nodes
    nodes = [dist.new_group(ranks[2 * i : 2 * i + 2]) for i in range(count)]
    peers = [dist.new_group(ranks[i::2]) for i in range(2)]
    in_groups = partial(form, intra_group=nodes[rank // 2], inter_group=peers[rank % 2])
    inside, between = 2 * (2 - 1) / 2, 2 * (count - 1) / count / 2
    words = "2(G-1)/G of the tensor in its node of G, 2(K-1)/K of 1/G between K nodes"
    check_sum(in_groups, rank, size, words, inside + between)
