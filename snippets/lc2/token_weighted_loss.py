# torchrun --nproc-per-node 2 snippets/lc2/token_weighted_loss.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
# Losses are 1, 2, 3 and 6 times the weight. Rank 0 has three tokens, rank 1 has one.
tokens = [torch.tensor([1.0, 2.0, 3.0]), torch.tensor([6.0])]
count = torch.tensor(len(tokens[rank]))
dist.all_reduce(count)  # before backward: an integer


def gradient(reduction: str, divide_by: float) -> float:
    layer = nn.Linear(1, 1, bias=False)
    model = DistributedDataParallel(layer, gradient_reduction=reduction)
    losses = model(tokens[rank].view(-1, 1))
    (losses.sum() / divide_by).backward()
    return layer.weight.grad.item()


biased = gradient("average", len(tokens[rank]))
right = gradient("sum", count.item())
also_right = gradient("average", count.item() / size)
if rank == 0:
    for number, losses in enumerate(tokens):
        print(f"losses of rank {number}:", *losses.tolist())
    print("one process:", torch.cat(tokens).mean().item())
    print("mean of the ranks' means:", biased)
    print("sums, divided by the global count:", right)
    print("the same with an averaging DDP:", also_right)

dist.barrier()
dist.destroy_process_group()
