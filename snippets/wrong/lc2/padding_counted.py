# torchrun --nproc-per-node 4 snippets/wrong/lc2/padding_counted.py
import os

import torch
import torch.distributed as dist
from torch.utils.data.distributed import DistributedSampler


def accuracy(correct):
    """The share of samples that are right, each rank looking at its own."""
    mine = list(DistributedSampler(correct, shuffle=False))
    counts = torch.tensor([sum(correct[i] for i in mine), len(mine)])
    dist.all_reduce(counts)
    hits, samples = counts.tolist()
    return hits, samples  # the bug: some samples were dealt twice


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for size in (8, 9, 10):
        correct = [True, True, *[False] * (size - 2)]  # 2 answers are right
        hits, samples = accuracy(correct)
        if rank == 0:
            print(f"{size} samples on 4 ranks: {hits} of {samples} right, "
                  f"{hits / samples:.3f}; one process: {2 / size:.3f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
