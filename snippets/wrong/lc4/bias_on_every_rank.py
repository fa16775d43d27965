# torchrun --nproc-per-node 4 snippets/wrong/lc4/bias_on_every_rank.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.comm.autograd import all_reduce_identity


def row_linear(x, shard, bias):
    """This rank's features [T, K / N] times its columns of the weight, summed."""
    return all_reduce_identity(F.linear(x, shard, bias))  # the bug: N biases


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    x, weight = torch.ones(1, 8), torch.ones(2, 8)
    for bias in (torch.zeros(2), torch.tensor([0.5, -1.0])):
        y = row_linear(x.chunk(4, 1)[rank], weight.chunk(4, 1)[rank], bias)
        print(f"rank {rank}: bias {bias.tolist()}, y {y.tolist()[0]}, "
              f"right is {F.linear(x, weight, bias).tolist()[0]}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
