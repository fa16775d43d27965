# torchrun --nproc-per-node 4 snippets/lc2/distributed_sampler.py
import os

import torch
import torch.distributed as dist

from xtrain.data_parallel import DistributedSampler

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
data = list("abcdefghij")  # 10 samples do not divide by 4

sampler = DistributedSampler(data, seed=1)
for epoch in range(2):
    sampler.set_epoch(epoch)
    print(f"rank {rank}, epoch {epoch}:", *(data[i] for i in sampler))

shorter = DistributedSampler(data, seed=1, drop_last=True)
print(f"rank {rank}, drop_last:", *(data[i] for i in shorter))

dist.barrier()
dist.destroy_process_group()
