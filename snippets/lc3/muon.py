# torchrun --nproc-per-node 4 snippets/lc3/muon.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import DIRECT
from xtrain.zero import FullyShardedDataParallel, Muon

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

torch.manual_seed(0)
bare = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Linear(16, 4))
model = FullyShardedDataParallel(bare)
biases = [piece for name, piece in model.named_parameters() if "bias" in name]
muon = Muon.of(model, lr=0.02, ns_dtype=torch.float32, collectives=DIRECT)
adamw = torch.optim.AdamW(biases, lr=0.01)

for step in range(3):
    torch.manual_seed(4 * step + rank)
    model(torch.randn(5, 8)).square().mean().backward()
    adamw.step()
    with CommLedger() as ledger:
        muon.step()
    model.zero_grad()

for name, piece in model.named_parameters():
    if "weight" in name:
        kept = sum(state.numel() for state in muon.state[piece].values())
        print(f"rank {rank}: {len(piece)} elements of {name}, momentum of {kept}")
print(f"rank {rank}: Muon sent {ledger.bytes_sent} bytes in a step")

# The same in one process, with all batches.
torch.manual_seed(0)
alone = nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 16), nn.Linear(16, 4))
matrices = [p for p in alone.parameters() if p.dim() == 2]
biases = [p for p in alone.parameters() if p.dim() == 1]
optimizers = [
    Muon(matrices, lr=0.02, ns_dtype=torch.float32),
    torch.optim.AdamW(biases, lr=0.01),
]
for step in range(3):
    for other in range(4):
        torch.manual_seed(4 * step + other)
        (alone(torch.randn(5, 8)).square().mean() / 4).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
state = model.full_state_dict()
apart = max((state[n] - p).abs().max().item() for n, p in alone.named_parameters())
print(f"rank {rank}: equal to one process: {apart < 1e-5}")

dist.barrier()
dist.destroy_process_group()
