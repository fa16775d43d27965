# torchrun --nproc-per-node 4 snippets/lc3/clip_shards.py
import os

import torch
import torch.distributed as dist

from xtrain.zero import clip_sharded_grad_norm_

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

whole = torch.tensor([3.0, 4.0, 0.0, 0.0, 0.0, 12.0, 0.0, 0.0])  # norm 13
shard = whole.chunk(4)[rank].clone()
print(f"rank {rank}: norm of my shard {shard.norm().item():g}")

norm = clip_sharded_grad_norm_([shard], max_norm=1.3)
print(f"rank {rank}: norm of all {norm.item():g}, my shard is now", end=" ")
print([round(x, 4) for x in shard.tolist()])

dist.barrier()
dist.destroy_process_group()
