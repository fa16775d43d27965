# torchrun --nproc-per-node 2 snippets/cluster/torch_ddp.py
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()

torch.manual_seed(0)
layers = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 1))
model = DistributedDataParallel(layers)
optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
inputs = torch.randn(size, 8, 64)[rank]  # each rank has 8 of the inputs
for _ in range(3):
    optimizer.zero_grad()
    loss = model(inputs).square().mean()
    loss.backward()  # its hooks average the gradients over the ranks
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"loss {total.item() / size:.4f} on {size} ranks")
dist.destroy_process_group()
