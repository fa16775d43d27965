# torchrun --nproc-per-node 4 snippets/lc4/embedding.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.tensor_parallel import HiddenParallelEmbedding, VocabParallelEmbedding

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

whole = nn.Embedding(12, 8)
ids = torch.tensor([[0, 2, 3, 5, 6, 8, 9, 11]])  # first and last id of every rank
y = whole(ids)
y.square().sum().backward()

for kind, dim in ((VocabParallelEmbedding, 0), (HiddenParallelEmbedding, 1)):
    layer = kind.from_full(whole)
    out = layer(ids)
    out.square().sum().backward()
    grad = whole.weight.grad.chunk(size, dim)[rank]
    print(f"rank {rank}, {kind.__name__}: table {list(layer.weight.shape)}, "
          f"output equal: {torch.equal(out, y)}, "
          f"gradient equal: {torch.equal(layer.weight.grad, grad)}")  # fmt: skip

if ids.is_cpu:  # a GPU checks ids itself: there the program ends
    try:
        VocabParallelEmbedding.from_full(whole)(torch.tensor([[3, 12]]))
    except ValueError as problem:
        print(f"rank {rank}: {problem}")

dist.barrier()
dist.destroy_process_group()
