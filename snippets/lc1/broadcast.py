# torchrun --nproc-per-node 8 snippets/lc1/broadcast.py
import os

import torch
import torch.distributed as dist

from xtrain import comm

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()


def broadcast_one_by_one(tensor, src):
    """What one writes first: the source sends a copy to each rank in turn."""
    for other in range(size):
        if rank == src and other != src:
            comm.send(tensor, other)
        elif rank == other and other != src:
            comm.recv(tensor, src)


for broadcast in (broadcast_one_by_one, comm.broadcast):
    tensor = torch.tensor([3.0, 1.0, 4.0]) if rank == 5 else torch.zeros(3)
    with comm.CommLedger() as ledger:
        broadcast(tensor, src=5)
    assert tensor.tolist() == [3.0, 1.0, 4.0]

    of_all_ranks = [None] * size
    dist.all_gather_object(of_all_ranks, ledger.events)
    if rank == 0:
        rounds = comm.message_rounds(of_all_ranks)
        print(f"{broadcast.__name__}: {sum(map(len, rounds))} messages")
        for number, messages in enumerate(rounds):
            pairs = "  ".join(f"{m.src}->{m.dst}" for m in messages)
            print(f"  round {number}: {pairs}")

dist.barrier()
dist.destroy_process_group()
