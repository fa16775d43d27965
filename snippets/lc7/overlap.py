# torchrun --nproc-per-node 2 snippets/lc7/overlap.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.expert_parallel import GShardMoE, OverlappedMoEBlock, overlapped_prefill

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)  # the same router and attention on both ranks

moe = GShardMoE(8, 16, num_experts=4, top_k=2, dtype=torch.float64)
attention = nn.Linear(8, 8, dtype=torch.float64)  # any module that keeps the shape
block = OverlappedMoEBlock(attention, moe)

torch.manual_seed(rank)  # other tokens, and not as many
x0 = torch.randn(1, 4 + rank, 8, dtype=torch.float64, requires_grad=True)
x1 = torch.randn(1, 6, 8, dtype=torch.float64, requires_grad=True)
grad = torch.randn_like(x0)

other = block.chunks(x0)  # the forward of micro-batch 0, alone
other.run()
block.events = []
forward = block.run_with_backward(x1, other, grad)  # its backward under x1's forward
names = [event.name for event in block.events]
ours = [p.grad for p in block.parameters()]

block.zero_grad()
y0, y1 = block(x0), block(x1)  # the same block with autograd's backward
y0.backward(grad)
equal = torch.allclose(forward.output, y1) and torch.allclose(other.dx, x0.grad)
equal &= all(
    torch.allclose(a, p.grad) for a, p in zip(ours, block.parameters(), strict=True)
)

block.events = None
turns = overlapped_prefill(block, x0, x1)
equal &= all(map(torch.allclose, turns, (y0, y1)))

if rank == 0:
    print("\n".join(names))
print(f"rank {rank}: output, dx, gradients and prefill equal: {equal}")
dist.barrier()
dist.destroy_process_group()
