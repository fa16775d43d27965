# torchrun --nproc-per-node 4 snippets/lc7/gshard.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import DIRECT
from xtrain.expert_parallel import GShardMoE, MoE

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same whole layer and the same tokens on every rank
full = MoE(8, 12, num_experts=8, top_k=2, dtype=torch.float64)
sizes = [5, 7, 4, 0]  # tokens of each rank
x = torch.randn(sum(sizes), 8, dtype=torch.float64, requires_grad=True)
grad = torch.randn_like(x)
whole = full(x)
whole.backward(grad)

layer = GShardMoE.from_full(full, collectives=DIRECT)  # two experts on each rank
mine = x.detach().split(sizes)[rank].clone().requires_grad_()
out = layer(mine)
with CommLedger() as ledger:
    out.backward(grad.split(sizes)[rank])

gate = layer.router.weight.grad  # of this rank's tokens: to be summed
dist.all_reduce(gate)
own = slice(2 * rank, 2 * rank + 2)
equal = {
    "output": torch.allclose(out, whole.split(sizes)[rank]),
    "dx": torch.allclose(mine.grad, x.grad.split(sizes)[rank]),
    "experts": torch.allclose(
        layer.experts.down_proj.grad, full.experts.down_proj.grad[own]
    ),
    "router": torch.allclose(gate, full.router.weight.grad),
}
rows = full.router.stats.counts_E[own].tolist()
here = (layer.router.stats.routing.experts_Tk // 2 == rank).sum().item()
away, back = 2 * sizes[rank] - here, sum(rows) - here
print(
    f"rank {rank}: {sizes[rank]} tokens, rows of its experts {rows}, equal: {equal}\n"
    f"  backward sends {away} rows to experts, {back} back: {ledger.bytes_sent} bytes"
)

dist.barrier()
dist.destroy_process_group()
