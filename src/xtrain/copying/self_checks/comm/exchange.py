"""Every rank gets what its left neighbour sent."""

import torch
import torch.distributed as dist

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.comm.exchange import exchange


def check(rank: int, size: int) -> None:
    right, left = (rank + 1) % size, (rank - 1) % size
    outgoing, incoming = randn(1000, seed=rank), torch.empty(1000)
    with Sent() as sent:
        exchange(outgoing, right, incoming, left)
    same("1,000 numbers from the left neighbour", incoming, randn(1000, seed=left))
    sends(sent, "one tensor", outgoing.nbytes)

    group, incoming = dist.new_group([1, 3]), outgoing.clone()
    if rank in (1, 3):
        exchange(outgoing, 4 - rank, incoming, 4 - rank, group)
    partner = 4 - rank if rank in (1, 3) else rank
    same("ranks 1 and 3 have swapped", incoming, randn(1000, seed=partner))
