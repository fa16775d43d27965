# torchrun --nproc-per-node 3 snippets/lc4/ring_matmul.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger
from xtrain.comm.ring_pass import RingPass
from xtrain.tensor_parallel import ColumnParallelLinear

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()

x = torch.full((4, 6), float(rank))  # 4 of 12 tokens, 6 features
for owner, piece in RingPass().visits(x):
    assert piece.eq(owner).all()
    if rank == 0:
        print(f"rank 0 multiplies the tokens of rank {owner}")

results = []
for overlap in (True, "ring"):
    torch.manual_seed(0)
    layer = ColumnParallelLinear(6, 9, sequence_parallel=True, overlap=overlap)
    mine = x.clone().requires_grad_()
    with CommLedger() as ledger:
        y = layer(mine)
        y.square().sum().backward()
    results.append([y, mine.grad, layer.weight.grad])
    if rank == 0:
        print(f"overlap={overlap!r}: y {list(y.shape)}, {ledger.bytes_sent} bytes sent")
same = all(torch.allclose(a, b) for a, b in zip(*results, strict=True))
if rank == 0:
    print("y, dX and dW are the same:", same)

dist.barrier()
dist.destroy_process_group()
