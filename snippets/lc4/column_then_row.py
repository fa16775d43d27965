# torchrun --nproc-per-node 2 snippets/lc4/column_then_row.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.tensor_parallel import ColumnParallelLinear, RowParallelLinear

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
up, down = nn.Linear(4, 6).double(), nn.Linear(6, 4).double()  # one process
x = torch.randn(3, 4).double()
y = down(torch.tanh(up(x)))
y.sum().backward()

column = ColumnParallelLinear.from_full(up)
row = RowParallelLinear.from_full(down)
print(f"rank {rank}: weights {list(column.weight.shape)} and {list(row.weight.shape)}, "
      f"biases {list(column.bias.shape)} and {list(row.bias.shape)}")  # fmt: skip
with CommLedger() as forward:
    out = row(torch.tanh(column(x.requires_grad_())))
with CommLedger() as backward:
    out.sum().backward()
print(f"rank {rank}: forward {[event.op for event in forward.events]}, "
      f"backward {[event.op for event in backward.events]}")  # fmt: skip
mine = up.weight.grad.chunk(2, 0)[rank]
print(f"rank {rank}: output as of one process: {torch.allclose(out, y)}, "
      f"gradient of my weight: {torch.allclose(column.weight.grad, mine)}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
