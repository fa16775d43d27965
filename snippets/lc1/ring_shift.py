# torchrun --nproc-per-node 4 snippets/lc1/ring_shift.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import ring_shift

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# What arrived is sent in the next step; after `size` steps all are at their owner.
travelling, incoming = torch.tensor([float(rank)]), torch.empty(1)
visited = [rank]
for _ in range(size):
    ring_shift(travelling, incoming)
    travelling, incoming = incoming, travelling
    visited.append(int(travelling.item()))
print(f"rank {rank} saw the values of ranks {visited}")

assert visited == [(rank - step) % size for step in range(size + 1)]

dist.barrier()
dist.destroy_process_group()
