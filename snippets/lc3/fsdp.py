# torchrun --nproc-per-node 4 snippets/lc3/fsdp.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.zero import AdamW, FullyShardedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()


class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(3)])

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


torch.manual_seed(rank)
model = FullyShardedDataParallel(Deep())
optimizer = AdamW(model.parameters(), lr=0.01)  # after wrapping
for name, piece in model.named_parameters():
    if name.startswith("layers.0"):
        print(f"rank {rank}: {name} has {piece.numel()} elements here")

for _step in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 5)).square().mean().backward()
    norm = model.clip_grad_norm_(1.0)
    optimizer.step()
state = model.full_state_dict()
print(f"rank {rank}: gradient norm {norm:.6f}")
whole = [f"{name} {list(t.shape)}" for name, t in state.items() if "1." in name]
print(f"rank {rank}: the whole model again:", *whole)

dist.barrier()
dist.destroy_process_group()
