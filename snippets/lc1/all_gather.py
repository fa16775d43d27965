# torchrun --nproc-per-node 3 snippets/lc1/all_gather.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import all_gather, all_gather_into_tensor

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
row = torch.tensor([10 * rank, 10 * rank + 1])

listed = [torch.empty_like(row) for _ in range(size)]
all_gather(listed, row)

joined = torch.empty(size * 2, dtype=row.dtype)  # one after the other
all_gather_into_tensor(joined, row)

stacked = torch.empty(size, 2, dtype=row.dtype)  # one above the other
all_gather_into_tensor(stacked, row)

if rank == 2:
    print(f"list    {[t.tolist() for t in listed]}")
    print(f"joined  {joined.tolist()}")
    print(f"stacked {stacked.tolist()}")
assert torch.equal(joined, torch.cat(listed))
assert torch.equal(stacked, torch.stack(listed))

dist.barrier()
dist.destroy_process_group()
