# torchrun --nproc-per-node 4 snippets/lc4/sequence_parallel.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.model import XtrainConfig
from xtrain.model.layer import SwiGLU
from xtrain.tensor_parallel import ParallelRMSNorm, ParallelSwiGLU

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)

config = XtrainConfig(
    vocab_size=1, hidden_size=16, intermediate_size=48, num_hidden_layers=1,
    num_attention_heads=1,
)  # fmt: skip
norm, mlp = nn.RMSNorm(16).double(), SwiGLU(config).double()
x = torch.randn(2, 8, 16).double()
y = x + mlp(norm(x))
y.square().sum().backward()

for split in (False, True):
    my_norm = ParallelRMSNorm.from_full(norm, sequence_parallel=split)
    my_mlp = ParallelSwiGLU.from_full(mlp, sequence_parallel=split)
    mine = x.chunk(size, 1)[rank] if split else x
    expected = y.chunk(size, 1)[rank] if split else y
    out = mine + my_mlp(my_norm(mine))
    out.square().sum().backward()
    grad = torch.allclose(my_norm.weight.grad, norm.weight.grad)
    name = "slices of the sequence" if split else "whole sequence"
    print(f"rank {rank}, {name}: norm, residual and sum on {list(mine.shape)}; "
          f"output equal: {torch.allclose(out, expected)}, "
          f"gradient of the norm's weight equal: {grad}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
