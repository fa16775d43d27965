# torchrun --nproc-per-node 2 snippets/lc1/use_a_backend.py
import torch
import torch.distributed as dist

import xtrain.backends

dist.init_process_group("xtrain-shm")  # was: "gloo"
rank = dist.get_rank()
fast, slow = dist.group.WORLD, dist.new_group(backend="gloo")

for group in (fast, slow):
    tensor = torch.full((3,), float(rank + 1))
    dist.all_reduce(tensor, group=group)
    print(f"rank {rank} over {dist.get_backend(group)}: {tensor.tolist()}")

gradients = xtrain.backends.shared_empty(1024, 1024)  # on every rank
gradients.fill_(rank + 1)
dist.all_reduce(gradients)  # reduced where it is
print(f"rank {rank}, in shared memory: {gradients[0, :3].tolist()}")
dist.destroy_process_group()
