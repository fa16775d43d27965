# torchrun --nproc-per-node 4 snippets/wrong/lc1/reduce_for_all_reduce.py
import os

import torch
import torch.distributed as dist


def add_up(tensor):
    """Meant: the sum for everybody. Written: a reduce, with the op in dst's place."""
    dist.reduce(tensor, dist.ReduceOp.SUM)  # the bug; read as dst=0, without a word


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()

    # Every rank's part of a gradient; their sum is the gradient.
    gradient = torch.tensor([10.0**rank, 2 * 10.0**rank])
    add_up(gradient)
    weight = torch.tensor([5000.0, 5000.0]) - gradient
    right = torch.tensor([5000.0 - 1111.0, 5000.0 - 2222.0])
    print(f"rank {rank}: the weights are right: {torch.equal(weight, right)}")

    dist.barrier()
    dist.destroy_process_group()
