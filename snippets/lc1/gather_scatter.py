# torchrun --nproc-per-node 4 snippets/lc1/gather_scatter.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import gather, scatter

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# Gather: rank 1 collects a piece from every rank; only rank 1 passes a list.
piece = torch.tensor([rank, rank * rank])
pieces = [torch.empty_like(piece) for _ in range(size)] if rank == 1 else None
gather(piece, pieces, dst=1)
if rank == 1:
    print(f"rank 1 gathered {[p.tolist() for p in pieces]}")

# Scatter: the way back. Rank 1 doubles all pieces and hands each to its owner.
doubled = [2 * p for p in pieces] if rank == 1 else None
mine = torch.empty_like(piece)
scatter(mine, doubled, src=1)
print(f"rank {rank} sent {piece.tolist()} and got {mine.tolist()}")
assert torch.equal(mine, 2 * piece)

dist.barrier()
dist.destroy_process_group()
