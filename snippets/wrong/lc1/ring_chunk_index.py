# torchrun --nproc-per-node 4 snippets/wrong/lc1/ring_chunk_index.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import ring_shift


def ring_all_reduce(tensor):
    rank, size = dist.get_rank(), dist.get_world_size()
    chunks = tensor.tensor_split(size)
    incoming = torch.empty_like(chunks[0])
    for step in range(size - 1):  # reduce-scatter: rank r ends up with chunk r
        ring_shift(chunks[(rank - 1 - step) % size], incoming)
        chunks[(rank - 2 - step) % size].add_(incoming)
    for step in range(size - 1):  # all-gather
        give = (rank + step) % size  # the bug: chunks come in falling order,
        take = (rank + 1 + step) % size  # so the step must be subtracted
        ring_shift(chunks[give], chunks[take])


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    ones = torch.ones(size)
    ring_all_reduce(ones)
    telling = torch.arange(1.0, size + 1) * 10**rank
    ring_all_reduce(telling)
    print(f"rank {rank}: ones {ones.tolist()}, telling data {telling.tolist()}")
    dist.barrier()
    dist.destroy_process_group()
