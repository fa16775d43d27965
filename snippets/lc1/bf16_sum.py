# torchrun --nproc-per-node 8 snippets/lc1/bf16_sum.py
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

# Rank 0 has 256, the seven others 1: the sum is 263. bf16 keeps 8 significant bits,
# so between 256 and 512 it holds even numbers only, and 256 + 1 rounds to 256 again.
tensor = torch.full((size,), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)

ring, wide, one_shot = tensor.clone(), tensor.float(), tensor.clone()
ring_all_reduce(ring)  # rounds to bf16 after every addition, on every hop
ring_all_reduce(wide)  # the same ring, twice the bytes
one_shot_all_reduce(one_shot)  # sends bf16, adds in fp32, rounds once

if rank == 0:
    print(f"bf16 ring:     {[int(x) for x in ring]}")
    print(f"fp32 ring:     {[int(x) for x in wide]}")
    print(f"bf16 one shot: {[int(x) for x in one_shot]}")

dist.barrier()
dist.destroy_process_group()
