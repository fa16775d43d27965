# python snippets/wrong/lc1/nccl_one_queue.py
import torch
import torch.distributed as dist

from xtrain.testing import RankError, World


def wrong():
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
    receiving = dist.irecv(incoming, other)  # the bug: first on both ranks,
    sending = dist.isend(mine, other)  # and this one is queued behind it
    receiving.wait()
    sending.wait()
    return incoming.item()


def right():
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
    calls = [
        dist.P2POp(dist.irecv, incoming, other),
        dist.P2POp(dist.isend, mine, other),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return incoming.item()


if __name__ == "__main__":
    for backend in ("gloo", "nccl-rules"):
        with World(2, backend) as world:
            for program in (right, wrong):
                try:
                    print(f"{backend}, {program.__name__}:", world.run(program))
                except RankError as error:
                    print(f"{backend}, {program.__name__}:", error.reports[0].summary)
