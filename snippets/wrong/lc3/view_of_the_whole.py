# torchrun --nproc-per-node 4 snippets/wrong/lc3/view_of_the_whole.py
import os

import torch
import torch.distributed as dist


def my_shard(gradient):
    """Meant: my quarter of the summed gradient, and the rest freed."""
    rank, size = dist.get_rank(), dist.get_world_size()
    shards = list(gradient.chunk(size))
    dist.reduce_scatter(shards[rank], shards)
    return shards[rank]  # the bug: a view, and it keeps the whole alive


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    shard = my_shard(torch.ones(4096))  # no other name holds the gradient now
    kept = shard.untyped_storage().nbytes()
    print(f"rank {rank}: {shard.numel()} elements of 4 bytes, sum of {shard[0]:g} "
          f"ranks; memory held: {kept} bytes")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
