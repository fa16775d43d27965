# torchrun --nproc-per-node 4 snippets/lc2/distributed_sampler.py
import torch.distributed as dist

from xtrain.data_parallel import DistributedSampler

dist.init_process_group("gloo")
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
