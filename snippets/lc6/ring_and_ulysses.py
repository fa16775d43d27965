# torchrun --nproc-per-node 6 snippets/lc6/ring_and_ulysses.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.comm import init_mesh
from xtrain.context_parallel import hybrid_attention, shard_sequence

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
mesh = init_mesh((3, 2), ("ring", "ulysses"))
ring, ulysses = mesh["ring"].get_group(), mesh["ulysses"].get_group()
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, 24, 4, dtype=torch.float64)  # 2 heads on 6 ranks


def cut(x, dim):
    """Over the ring in zigzag, and each of these parts over ulysses in runs."""
    return shard_sequence(shard_sequence(x, dim, "zigzag", ring), dim, group=ulysses)


out = hybrid_attention(*(cut(x, 2) for x in (q, k, v)), balance="zigzag", mesh=mesh)
whole = F.scaled_dot_product_attention(q, k, v, is_causal=True)
for rank in range(6):
    dist.barrier()
    if rank == dist.get_rank():
        print(f"rank {rank} at {mesh.get_coordinate()} holds tokens "
              f"{cut(torch.arange(24), 0).tolist()}; "
              f"equal: {torch.allclose(out, cut(whole, 2))}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
