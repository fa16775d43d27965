# torchrun --nproc-per-node 2 snippets/wrong/lc8/only_rank_0.py
import os
import tempfile

import torch
import torch.distributed as dist


def first_alone(weight, path):
    if dist.get_rank() == 0:  # the bug: of data ranks this is right
        torch.save(weight.clone(), path)
    dist.barrier()
    return torch.load(path)


def everyone(weight, path):
    torch.save(weight.clone(), f"{path}-{dist.get_rank()}")
    dist.barrier()
    return torch.load(f"{path}-{dist.get_rank()}")


def restored(whole, save_and_load, path):
    """A weight [R, H] whose rows are cut over the ranks, after a checkpoint."""
    own = whole.chunk(dist.get_world_size())[dist.get_rank()]
    loaded = save_and_load(own, path)
    parts = [torch.empty_like(loaded) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, loaded)
    return torch.cat(parts)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    folder, whole = [tempfile.mkdtemp()], torch.arange(4.0)[:, None]
    dist.broadcast_object_list(folder)
    for rule in (first_alone, everyone):
        found = restored(whole, rule, f"{folder[0]}/{rule.__name__}")
        print(f"rank {dist.get_rank()}, {rule.__name__:11}: weight 0 1 2 3 is now "
              f"{found.flatten().int().tolist()}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
