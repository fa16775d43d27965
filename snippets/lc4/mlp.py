# torchrun --nproc-per-node 4 snippets/lc4/mlp.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger
from xtrain.model import XtrainConfig
from xtrain.model.layer import SwiGLU
from xtrain.tensor_parallel import ParallelSwiGLU

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
whole = SwiGLU(config).double()
x = torch.randn(2, 5, 16).double()
y = whole(x)
y.square().sum().backward()

block = ParallelSwiGLU.from_full(whole)
mine = x.clone().requires_grad_()  # as if there were a layer before
with CommLedger() as forward:
    out = block(mine)
with CommLedger() as backward:
    out.square().sum().backward()

grad = block.gate_proj.weight.grad
same = torch.allclose(grad, whole.gate_proj.weight.grad.chunk(size)[rank])
print(f"rank {rank}: gate {list(block.gate_proj.weight.shape)}, "
      f"down {list(block.down_proj.weight.shape)}; "
      f"output equal: {torch.allclose(out, y)}, gradient equal: {same}")  # fmt: skip
if rank == 0:
    for name, ledger in (("forward", forward), ("backward", backward)):
        print(name, [(e.op, e.payload // 8) for e in ledger.events], "elements")

dist.barrier()
dist.destroy_process_group()
