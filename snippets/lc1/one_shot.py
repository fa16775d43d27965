# torchrun --nproc-per-node 4 snippets/lc1/one_shot.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import one_shot_all_reduce, ring_all_reduce

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# Addition of floats depends on the order. One-shot: every rank has all numbers and
# adds them in rank order. Ring: the order depends on the chunk.
numbers = torch.tensor([1e8, 1.0, -1e8, 1.0])
one_shot, ring = numbers[rank].repeat(size), numbers[rank].repeat(size)
one_shot_all_reduce(one_shot)
ring_all_reduce(ring)

in_rank_order = numbers[0] + numbers[1] + numbers[2] + numbers[3]
print(f"rank {rank}: one shot {one_shot.tolist()}, ring {ring.tolist()}")
assert (one_shot == in_rank_order).all()

dist.barrier()
dist.destroy_process_group()
