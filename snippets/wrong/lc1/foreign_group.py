# torchrun --nproc-per-node 4 snippets/wrong/lc1/foreign_group.py
import os
import warnings

import torch
import torch.distributed as dist


def sum_by_halves(tensor, halves):
    """Ranks 0 and 1 add up theirs, ranks 2 and 3 theirs."""
    dist.all_reduce(tensor, group=halves[0])  # the bug: ranks 2 and 3 are not in it


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    foreign = halves[1] if rank < 2 else halves[0]
    print(f"rank {rank}: to me the other half is {foreign}, and I am its rank", end=" ")
    print(dist.get_rank(foreign))

    tensor = torch.tensor([10.0**rank])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        sum_by_halves(tensor, halves)
    print(f"  the sum of my half: {tensor.item()}, no error")
    for warning in caught:
        print(f"  a warning: {warning.message}")
    dist.barrier()
    dist.destroy_process_group()
