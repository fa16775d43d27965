# torchrun --nproc-per-node 4 snippets/lc1/all_to_all_unequal.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import all_to_all_single, exchange_split_sizes

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# Rank r sends (r * j) % 3 rows to rank j: other counts for every pair, some zero.
sends = [(rank * to) % 3 for to in range(size)]
owners = torch.arange(size).repeat_interleave(torch.tensor(sends))
rows = torch.stack([torch.full_like(owners, rank), owners], dim=1)  # (from, to)

# No rank knows how much will arrive until the senders tell it: one number per pair.
receives = exchange_split_sizes(sends)
arrived = torch.empty(sum(receives), 2, dtype=rows.dtype)
all_to_all_single(arrived, rows, receives, sends)
print(f"rank {rank}: sends {sends}, receives {receives}: {arrived.tolist()}")

assert (arrived[:, 1] == rank).all()  # every row was meant for this rank
assert arrived[:, 0].tolist() == [r for r in range(size) for _ in range(receives[r])]

dist.barrier()
dist.destroy_process_group()
