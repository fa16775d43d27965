# torchrun --nproc-per-node 2 snippets/wrong/lc2/same_order_every_epoch.py
import warnings
from textwrap import fill

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

from xtrain import data_parallel


def epochs(sampler, count):
    """The order in which this rank sees its samples, epoch by epoch."""
    loader = DataLoader(sampler.dataset, batch_size=4, sampler=sampler)
    orders = []
    for _epoch in range(count):  # the bug: set_epoch is not called
        orders.append(torch.cat(list(loader)).tolist())
    return orders


if __name__ == "__main__":
    # On CPUs: torch's sampler does not work with another default device.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for epoch, order in enumerate(epochs(DistributedSampler(range(12)), 3)):
        print(f"rank {rank}, epoch {epoch}:", *order)

    with warnings.catch_warnings(record=True) as caught:
        epochs(data_parallel.DistributedSampler(range(12)), 3)
    for warning in caught:
        print(
            fill(
                f"rank {rank}, our sampler: {warning.message}",
                84,
                subsequent_indent="  ",
            )
        )

    dist.barrier()
    dist.destroy_process_group()
