# torchrun --nproc-per-node 2 snippets/wrong/lc4/owner_of_ids.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.comm.autograd import all_reduce_identity


def without_mask(ids, shard):
    """Rows of a table of which each rank holds V / N."""
    local = ids - dist.get_rank() * len(shard)
    others = (local < 0) | (local >= len(shard))
    rows = F.embedding(local.masked_fill(others, 0), shard)
    return all_reduce_identity(rows)  # the bug: my row 0 for the ids of others


def off_by_one(ids, shard):
    """The same with a mask, and with a wrong idea of who owns an id."""
    local = ids - dist.get_rank() * len(shard)
    others = (local <= 0) | (local >= len(shard))  # the bug: no rank owns first ids
    rows = F.embedding(local.masked_fill(others, 0), shard)
    return all_reduce_identity(rows.masked_fill(others.unsqueeze(-1), 0.0))


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    table = torch.arange(1.0, 7.0).unsqueeze(1)  # the row of id i is i + 1
    ids = torch.arange(6)
    print(f"rank {rank}: right        {table[ids].flatten().tolist()}")
    for function in (without_mask, off_by_one):
        rows = function(ids, table.chunk(2)[rank]).flatten().tolist()
        print(f"rank {rank}: {function.__name__:12} {rows}")

    dist.barrier()
    dist.destroy_process_group()
