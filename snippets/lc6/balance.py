# torchrun --nproc-per-node 4 snippets/lc6/balance.py
import os

import torch
import torch.distributed as dist

from xtrain.context_parallel import local_positions, ring_attention, shard_sequence
from xtrain.context_parallel.block_attention import TILES

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, ranks, tokens = dist.get_rank(), dist.get_world_size(), 16
torch.manual_seed(0)
q, k, v = torch.randn(3, 1, 2, tokens, 8)  # the same on every rank

work = []


def forward(q, k, v, causal, scale):
    """The block as the library computes it, and how many pairs it has."""
    mask = torch.ones(q.shape[2], k.shape[2])
    work.append(int((mask.tril() if causal else mask).sum()))
    return TILES.forward(q, k, v, causal, scale)


for balance in ("none", "striped", "zigzag"):
    work.clear()
    mine = [shard_sequence(t, 2, balance) for t in (q, k, v)]
    counted = TILES._replace(forward=forward)
    ring_attention(*mine, balance=balance, block_attention=counted)

    held = local_positions(tokens // ranks, balance).tolist()
    print(f"rank {rank}, {balance:7}: tokens {held}, {sum(work)} pairs in {work}")
    dist.barrier()
dist.destroy_process_group()
