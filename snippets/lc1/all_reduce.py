# torchrun --nproc-per-node 4 snippets/lc1/all_reduce.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import all_reduce

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

for op in ("SUM", "AVG", "MIN", "MAX", "PRODUCT"):
    ours = torch.tensor([rank + 1.0, -2.0 * rank])
    theirs = ours.clone()
    all_reduce(ours, getattr(dist.ReduceOp, op))
    dist.all_reduce(theirs, getattr(dist.ReduceOp, op))
    assert torch.equal(ours, theirs)
    if rank == 0:
        print(f"{op:8} {ours.tolist()}  equal to torch's: {ours.equal(theirs)}")

dist.barrier()
dist.destroy_process_group()
