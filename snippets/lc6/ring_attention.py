# torchrun --nproc-per-node 4 snippets/lc6/ring_attention.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.comm import CommLedger
from xtrain.context_parallel import ring_attention, shard_sequence

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)  # the same whole sequence on every rank

q = torch.randn(1, 4, 16, 8, dtype=torch.float64, requires_grad=True)
k, v = torch.randn(2, 1, 2, 16, 8, dtype=torch.float64)  # 2 key heads for 4 heads
k.requires_grad_(), v.requires_grad_()
grad = torch.randn_like(q)
whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
whole.backward(grad)


def cut(x):
    """This rank's 4 of 16 tokens: two early ones, two late ones."""
    return shard_sequence(x.detach(), 2, "zigzag")


mine = [cut(x).requires_grad_() for x in (q, k, v)]
with CommLedger() as forward:
    out = ring_attention(*mine, causal=True, balance="zigzag")
with CommLedger() as backward:
    out.backward(cut(grad))

equal = [torch.allclose(out, cut(whole))]
for ours, x in zip(mine, (q, k, v), strict=True):
    equal.append(torch.allclose(ours.grad, cut(x.grad)))
print(f"rank {rank}: output, dq, dk, dv equal one process: {equal}; "
      f"{forward.messages} messages forward, {backward.messages} backward")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
