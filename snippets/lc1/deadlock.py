# torchrun --nproc-per-node 3 snippets/lc1/deadlock.py
import os
from datetime import timedelta

import torch
import torch.distributed as dist

# Rank 0 loses patience after two seconds, the others would wait for a minute.
patience = 2 if os.environ["RANK"] == "0" else 60
dist.init_process_group("gloo", timeout=timedelta(seconds=patience))
rank, size = dist.get_rank(), dist.get_world_size()
right, left = (rank + 1) % size, (rank - 1) % size

mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
try:
    dist.send(mine, right)  # waits until `right` receives, who waits in its own send
    dist.recv(incoming, left)  # never reached
    print(f"rank {rank} received {incoming.item()}")
except RuntimeError as error:
    reason = str(error).rpartition("] ")[2]  # without the place in gloo's source
    if rank > 0:
        reason = "still waiting when rank 0 hung up"
    print(f"rank {rank}, in its send to rank {right}: {reason}")
