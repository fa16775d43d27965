# torchrun --nproc-per-node 4 snippets/lc3/sharded_checkpoint.py
import os
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from xtrain.zero import AdamW, FullyShardedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
folder = [tempfile.mkdtemp() if rank == 0 else None]
dist.broadcast_object_list(folder)


def build(seed: int, group=None):
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 3))
    model = FullyShardedDataParallel(net, group, blocks=[nn.Linear])
    return model, AdamW(model.parameters(), lr=0.01)


def train(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 6)).square().mean().backward()
    optimizer.step()
    return model.full_state_dict()


model, optimizer = build(seed=0)  # on four ranks
train(model, optimizer)
model.save_sharded(folder[0], step=1, optimizer=optimizer)
if rank == 0:
    files = sorted(f for f in Path(folder[0]).rglob("*") if f.is_file())
    print("written:", *(f.relative_to(folder[0]) for f in files), sep="\n  ")
expected = train(model, optimizer)  # one step more

pair = dist.new_group([0, 1])
if rank < 2:
    model, optimizer = build(seed=9, group=pair)  # other weights, on two ranks
    step, _ = model.load_sharded(folder[0], optimizer)
    again = train(model, optimizer)
    same = all(torch.allclose(expected[k], again[k], atol=1e-6) for k in expected)
    print(f"rank {rank}: went on from step {step} on two ranks, same weights: {same}")

dist.barrier()
dist.destroy_process_group()
