# torchrun --nproc-per-node 4 snippets/lc1/reduce_scatter.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, reduce_scatter_tensor

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# Chunk c of rank r is [10^r * (c + 1)]: no two chunks are alike.
chunks = torch.arange(1.0, size + 1) * 10**rank
mine = torch.empty(1)
with CommLedger() as ledger:
    reduce_scatter_tensor(mine, chunks)
print(f"rank {rank} had {chunks.tolist()}")
print(f"  and holds the sum of chunk {rank}: {mine.item()}")

assert mine.item() == 1111.0 * (rank + 1)
assert ledger.bytes_sent == (size - 1) * mine.nbytes  # not through one rank

dist.barrier()
dist.destroy_process_group()
