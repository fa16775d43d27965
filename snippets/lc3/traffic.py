# torchrun --nproc-per-node 4 snippets/lc3/traffic.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain import comm, zero

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
ring = comm.collective_choice.RING  # lecture 1's, whose bytes are counted


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(4)])


def step(model, optimizer) -> float:
    """Payload of one training step, in units of (N-1)/N times the parameters."""
    with comm.CommLedger() as ledger:
        model(torch.ones(2, 16)).sum().backward()
        optimizer.step()
    return ledger.bytes_sent / (phi * 4 * (size - 1) / size)


phi = sum(p.numel() for p in build().parameters())
for stage in (1, 2):
    net = build()
    optimizer = zero.ZeroOptimizer(
        net.parameters(), zero.AdamW, stage=stage, collectives=ring
    )
    if rank == 0:
        print(f"stage {stage}: {step(net, optimizer):g} Phi")
    else:
        step(net, optimizer)
for free in (True, False):
    model = zero.FullyShardedDataParallel(
        build(), blocks=[nn.Linear], reshard_after_forward=free, collectives=ring
    )
    sent = step(model, zero.AdamW(model.parameters()))
    if rank == 0:
        print(f"stage 3, weights freed after forward {free}: {sent:g} Phi")

dist.barrier()
dist.destroy_process_group()
