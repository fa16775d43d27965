# torchrun --nproc-per-node 3 snippets/lc1/process_group.py
import os

import torch
import torch.distributed as dist

# torchrun started this file three times and told each process its rank.
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
told = "  ".join(f"{name}={os.environ[name]}" for name in names)
print(f"{told}  initialized: {dist.is_initialized()}")

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)  # reads the variables, finds the others, connects
rank, size = dist.get_rank(), dist.get_world_size()
print(f"  rank {rank} of {size} on {dist.get_backend()}: {dist.is_initialized()}")

total = torch.tensor(rank)
dist.all_reduce(total)
print(f"  the ranks add up to {total.item()}")

# A rank that leaves closes its connections, also those that others still need.
dist.barrier()
dist.destroy_process_group()
print(f"  after destroy: {dist.is_initialized()}")
