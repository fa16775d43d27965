# python snippets/wrong/lc1/ring_rank_0_first.py
import torch
import torch.distributed as dist

from xtrain import comm
from xtrain.testing import World


def ring_shift(send, recv):
    """No deadlock: rank 0 sends first, everybody else receives first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    if rank == 0:
        comm.send(send, right)
        comm.recv(recv, left)
    else:
        comm.recv(recv, left)  # the bug: waits for the whole chain before it
        comm.send(send, right)


def one_shift(shift):
    """The value that arrived, and the messages of this rank."""
    mine, incoming = torch.tensor([float(dist.get_rank())]), torch.empty(1)
    with comm.CommLedger() as ledger:
        shift(mine, incoming)
    return incoming.item(), ledger.events


if __name__ == "__main__":
    for size in (4, 8):
        with World(size) as world:
            for name, shift in (("here", ring_shift), ("comm", comm.ring_shift)):
                values, events = zip(*world.run(one_shift, shift), strict=True)
                rounds = len(comm.message_rounds(events))
                print(f"{name}.ring_shift, {size} ranks: {rounds} rounds, got {values}")
