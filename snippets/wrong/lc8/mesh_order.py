# torchrun --nproc-per-node 4 snippets/wrong/lc8/mesh_order.py
import os
import tempfile

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh


def by_rank(mesh):
    """The name of a rank's file."""
    return f"rank-{dist.get_rank()}"  # the bug: which slice is it?


def by_slice(mesh):
    return f"tensor-{mesh['tensor'].get_local_rank()}"


def saved_and_loaded(whole, axes, name, folder):
    """Save slices of a weight [R, H] on one mesh, and put them together on another."""
    first, second = (init_mesh((2, 2), order) for order in axes)
    slice_ = whole.chunk(2)[first["tensor"].get_local_rank()]
    torch.save(slice_.clone(), f"{folder}/{name(first)}-of-{dist.get_rank()}")
    dist.barrier()
    files = sorted(os.listdir(folder))
    mine = next(file for file in files if file.startswith(f"{name(second)}-of"))
    loaded = torch.load(f"{folder}/{mine}")
    parts = [torch.empty_like(loaded) for _ in range(2)]
    dist.all_gather(parts, loaded, group=second["tensor"].get_group())
    dist.barrier()
    return torch.cat(parts)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, whole = dist.get_rank(), torch.arange(4.0)[:, None]
    axes = ("data", "tensor"), ("tensor", "data")
    for name in (by_rank, by_slice):
        folder = [tempfile.mkdtemp()]
        dist.broadcast_object_list(folder)
        found = saved_and_loaded(whole, axes, name, folder[0])
        print(f"rank {rank}, {name.__name__:8}: weight 0 1 2 3 is now "
              f"{found.flatten().int().tolist()}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
