# python snippets/wrong/lc1/all_send_first.py
import torch
import torch.distributed as dist

from xtrain.testing import RankTimeout, World


def ring_shift(send, recv):
    """Everybody sends to the right, then everybody receives from the left."""
    rank, size = dist.get_rank(), dist.get_world_size()
    dist.send(send, (rank + 1) % size)  # the bug: no rank gets past this line
    dist.recv(recv, (rank - 1) % size)


def program():
    mine, incoming = torch.tensor([float(dist.get_rank())]), torch.empty(1)
    ring_shift(mine, incoming)
    return incoming.item()


if __name__ == "__main__":
    with World(3) as world:
        try:
            print(world.run(program, timeout=2))
        except RankTimeout as error:
            print(error.headline)
            for report in error.reports:
                print(f"rank {report.rank}: {report.summary.partition(', in ')[0]}")
            print("the stack of rank 0, without the lines inside torch:")
            for call in error.reports[0].detail.split("  File ")[1:]:
                if "all_send_first.py" in call:
                    print(f"  {call.partition(', ')[2]}", end="")
