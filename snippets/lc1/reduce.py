# torchrun --nproc-per-node 4 snippets/lc1/reduce.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import reduce

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

tensor = torch.tensor([10.0**rank, float(rank)])
before = tensor.clone()
reduce(tensor, dst=2)

# Only dst has the sum. Ours leaves the others as they were; torch leaves them
# undefined, and gloo leaves partial sums there.
if rank == 2:
    print(f"rank {rank} has the sum {tensor.tolist()}")
    assert tensor.tolist() == [1111.0, 6.0]
else:
    print(f"rank {rank} keeps {tensor.tolist()}")
    assert torch.equal(tensor, before)

dist.barrier()
dist.destroy_process_group()
