# torchrun --nproc-per-node 3 snippets/wrong/lc1/one_buffer_for_all.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import exchange


def exchange_counts(counts):
    """Tell every rank how many rows it will get; return what the others told."""
    rank, size = dist.get_rank(), dist.get_world_size()
    told = [torch.tensor([count]) for count in counts]
    arriving = [torch.zeros(1, dtype=torch.int64)] * size  # the bug: one tensor
    arriving[rank].copy_(told[rank])
    for step in range(1, size):
        to, source = (rank + step) % size, (rank - step) % size
        exchange(told[to], to, arriving[source], source)
    return [int(count) for count in arriving]


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    for name, table in (
        ("every sender the same", [[10, 20, 30]] * size),
        ("every sender its own", [[11, 12, 13], [21, 22, 23], [31, 32, 33]]),
    ):
        expected = [row[rank] for row in table]
        print(f"rank {rank}, {name}: expected {expected}")
        print(f"  read {exchange_counts(table[rank])}")
    dist.barrier()
    dist.destroy_process_group()
