# python snippets/wrong/lc5/send_first.py
import torch
import torch.distributed as dist

from xtrain.testing import RankTimeout, World


def swap(send, recv, peer):
    """In the steady part of 1F1B: an output one way, a gradient the other way."""
    dist.send(send, peer)  # the bug: the neighbour sends first, too
    dist.recv(recv, peer)


def program():
    mine, came = torch.tensor([float(dist.get_rank())]), torch.empty(1)
    swap(mine, came, 1 - dist.get_rank())
    return came.item()


if __name__ == "__main__":
    with World(2) as world:
        try:
            print(world.run(program, timeout=2))
        except RankTimeout as error:
            print(error.headline)
            for report in error.reports:
                print(f"rank {report.rank}: {report.summary.partition(', in ')[0]}")
