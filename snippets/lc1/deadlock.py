# torchrun --nproc-per-node 3 snippets/lc1/deadlock.py
from datetime import timedelta

import torch
import torch.distributed as dist

# gloo's send waits for its receive. With NCCL the GPU would wait, and for ever.
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % size, (rank - 1) % size
# Rank 0 gives up after two seconds, the others would wait for a minute.
limit = timedelta(seconds=2 if rank == 0 else 60)


def send(tensor, dst):
    """What `dist.send` does, with a limit."""
    dist.isend(tensor, dst).wait(limit)


mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
try:
    send(mine, right)  # waits until `right` receives, which waits in its own send
    dist.recv(incoming, left)  # never reached
    print(f"rank {rank} received {incoming.item()}")
except RuntimeError as error:
    reason = str(error).rpartition("] ")[2]  # without the place in gloo's source
    if rank > 0:
        reason = "still waiting when rank 0 gave up"
    print(f"rank {rank}, in its send to rank {right}: {reason}")
