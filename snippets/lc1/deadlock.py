# torchrun --nproc-per-node 3 snippets/lc1/deadlock.py
from datetime import timedelta

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
rank, size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % size, (rank - 1) % size

mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
try:
    dist.send(mine, right)  # waits until `right` receives, who waits in its own send
    dist.recv(incoming, left)  # never reached
    print(f"rank {rank} received {incoming.item()}")
except RuntimeError as error:
    reason = str(error).rpartition("] ")[2]  # without the place in gloo's source
    print(f"rank {rank} to rank {right}: {reason}")
