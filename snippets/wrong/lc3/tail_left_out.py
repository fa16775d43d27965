# torchrun --nproc-per-node 3 snippets/wrong/lc3/tail_left_out.py
import os

import torch
import torch.distributed as dist


def step(weights, gradients, lr):
    """Each rank updates its third, then all gather the weights."""
    rank, size = dist.get_rank(), dist.get_world_size()
    each = len(weights) // size  # the bug: 8 // 3 is 2, and 3 * 2 is 6
    mine = slice(rank * each, (rank + 1) * each)
    shard = weights[mine] - lr * gradients[mine]
    shards = [torch.empty(each) for _ in range(size)]
    dist.all_gather(shards, shard)
    weights[: each * size] = torch.cat(shards)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    for count in (6, 7, 8):
        weights = torch.ones(count)
        for _step in range(3):
            step(weights, torch.ones(count), lr=0.25)
        print(f"rank {dist.get_rank()}, {count} weights: {weights.tolist()}")

    dist.barrier()
    dist.destroy_process_group()
