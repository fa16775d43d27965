# torchrun --nproc-per-node 4 snippets/lc1/all_to_all.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import all_to_all_single

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# Row j is for rank j; its number tells: from `rank`, to j.
rows = torch.tensor([10 * rank + to for to in range(size)])
arrived = torch.empty_like(rows)
all_to_all_single(arrived, rows)
print(f"rank {rank}: {rows.tolist()} -> {arrived.tolist()}")

# The table with one line per rank has been transposed; once more turns it back.
assert arrived.tolist() == [10 * source + rank for source in range(size)]
back = torch.empty_like(rows)
all_to_all_single(back, arrived)
assert torch.equal(back, rows)

dist.barrier()
dist.destroy_process_group()
