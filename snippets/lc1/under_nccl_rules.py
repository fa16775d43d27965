# torchrun --nproc-per-node 4 snippets/lc1/under_nccl_rules.py
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import xtrain.backends  # noqa: F401  (it makes the backend known to torch)

dist.init_process_group("nccl-rules")  # was: "gloo"
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
model = DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.full((4, 2), float(rank))).mean().backward()  # averages the gradients
mean_rank = model.module.weight.grad[0, 0].item()

mine, incoming = torch.tensor([float(rank)]), torch.empty(1)
calls = [
    dist.P2POp(dist.isend, mine, (rank + 1) % size),
    dist.P2POp(dist.irecv, incoming, (rank - 1) % size),
]
for work in dist.batch_isend_irecv(calls):
    work.wait()
print(f"rank {rank}: gradient {mean_rank}, received {incoming.item()}")
dist.barrier()
dist.destroy_process_group()
