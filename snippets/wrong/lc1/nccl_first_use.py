# python snippets/wrong/lc1/nccl_first_use.py
import torch
import torch.distributed as dist

from xtrain.testing import RankError, World


def wrong():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
    sending = dist.isend(mine, (rank + 1) % size)  # the bug: waits for that rank,
    receiving = dist.irecv(incoming, (rank - 1) % size)  # which waits for the next
    sending.wait()
    receiving.wait()
    return incoming.item()


def right():
    rank, size = dist.get_rank(), dist.get_world_size()
    mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
    calls = [
        dist.P2POp(dist.isend, mine, (rank + 1) % size),
        dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return incoming.item()


if __name__ == "__main__":
    for backend in ("gloo", "nccl-rules"):
        with World(3, backend) as world:
            for program in (right, wrong):
                try:
                    print(f"{backend}, {program.__name__}:", world.run(program))
                except RankError as error:
                    print(f"{backend}, {program.__name__}:", error.reports[0].summary)
