# torchrun --nproc-per-node 5 snippets/lc1/deadlock_cures.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import exchange

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % size, (rank - 1) % size


def even_odd(mine, incoming):
    """Even ranks send first, odd ranks receive first: no circle of waiting senders."""
    if rank % 2 == 0:
        dist.send(mine, right)
        dist.recv(incoming, left)
    else:
        dist.recv(incoming, left)
        dist.send(mine, right)


def isend_irecv(mine, incoming):
    """Start both, wait for both. With NCCL the pairs must be connected already."""
    works = [dist.irecv(incoming, left), dist.isend(mine, right)]
    for work in works:
        work.wait()


def batch(mine, incoming):
    """Hand both to the backend at once; NCCL needs this form."""
    calls = [
        dist.P2POp(dist.irecv, incoming, left),
        dist.P2POp(dist.isend, mine, right),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def one_call(mine, incoming):
    """`exchange` picks the form that the backend needs."""
    exchange(mine, right, incoming, left)


for cure in (even_odd, isend_irecv, batch, one_call):
    mine, incoming = torch.tensor([float(rank)]), torch.full((1,), -1.0)
    cure(mine, incoming)
    print(f"rank {rank} received {incoming.item()} from rank {left} by {cure.__name__}")
    assert incoming.item() == left

dist.barrier()
dist.destroy_process_group()
