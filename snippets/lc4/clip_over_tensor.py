# torchrun --nproc-per-node 4 snippets/lc4/clip_over_tensor.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import init_mesh
from xtrain.model import XtrainConfig, XtrainModel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
tokens = torch.arange(24).view(4, 6) % 8
config = XtrainConfig(
    vocab_size=8,
    hidden_size=5,
    intermediate_size=4,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=2,
    initializer_range=0.4,
)


def norm_of(model) -> float:
    """As torch sees it: of the gradients that this process has."""
    gradients = [p.grad for p in model.parameters()]
    return nn.utils.get_total_norm(gradients).item()


whole = XtrainModel(config, dtype=torch.float64)
whole.loss(tokens, tokens.roll(-1, dims=1)).backward()
cut = XtrainModel(config, init_mesh((4,), ("tensor",)), dtype=torch.float64)
cut.loss(tokens, tokens.roll(-1, dims=1)).backward()
cut.sync_gradients()  # two ranks share a key head

own = norm_of(cut)
norm = cut.clip_grad_norm_(0.5).item()
print(f"rank {rank}: my slices alone {own:.4f}, the model's norm {norm:.4f}")
if rank == 0:
    print(f"one process: {norm_of(whole):.4f}")

dist.barrier()
dist.destroy_process_group()
