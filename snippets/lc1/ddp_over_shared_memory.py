# torchrun --nproc-per-node 2 snippets/lc1/ddp_over_shared_memory.py
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from xtrain import backends

torch.set_num_threads(1)
backends.register()
dist.init_process_group("xtrain-shm")
rank = dist.get_rank()


def train(group):
    """Five steps of torch's own DDP; the weights that come out."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.Linear(16, 1)
    )
    ddp = DistributedDataParallel(model, process_group=group)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)  # every rank has a batch of its own
    x = torch.randn(32, 8)
    for _ in range(5):
        optimizer.zero_grad()
        loss = (ddp(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
    return torch.cat([weight.detach().flatten() for weight in model.parameters()])


ours = train(None)  # the default group: a hand-written backend
gloo = train(dist.new_group(backend="gloo"))
sockets = train(dist.new_group(backend="xtrain-socket"))
print(f"rank {rank} trained over {dist.get_backend()}")
print(f"  same weights as over gloo: {torch.equal(ours, gloo)}")
print(f"  same weights as over xtrain-socket: {torch.equal(ours, sockets)}")

everyone = [torch.empty_like(ours) for _ in range(dist.get_world_size())]
dist.all_gather(everyone, ours)
print(f"  same weights on all ranks: {all(torch.equal(ours, w) for w in everyone)}")
dist.destroy_process_group()
