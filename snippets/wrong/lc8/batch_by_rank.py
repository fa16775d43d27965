# torchrun --nproc-per-node 4 snippets/wrong/lc8/batch_by_rank.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh


def by_rank(rows, mesh):
    """This rank's rows of the global batch [B, H]."""
    # The bug: two ranks of a tensor group multiply slices of one model with two inputs.
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def by_data_rank(rows, mesh):
    data = mesh["data"]
    return rows.chunk(data.size())[data.get_local_rank()]


def loss(rows, weights, mesh, choose):
    """Mean square of an MLP whose inner columns are cut over tensor ranks."""
    x, tensor, data = choose(rows, mesh), mesh["tensor"], mesh["data"]
    size, rank = tensor.size(), tensor.get_local_rank()
    up, down = weights[0].chunk(size, 1)[rank], weights[1].chunk(size, 0)[rank]
    y = (x @ up).relu() @ down
    dist.all_reduce(y, group=tensor.get_group())
    mean = y.square().mean()
    dist.all_reduce(mean, group=data.get_group())
    return mean / data.size()


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    mesh, rank = init_mesh((2, 2), ("data", "tensor")), dist.get_rank()
    torch.manual_seed(0)
    rows, weights = torch.randn(8, 4), (torch.randn(4, 6), torch.randn(6, 4))
    right = ((rows @ weights[0]).relu() @ weights[1]).square().mean()
    for choose in (by_rank, by_data_rank):
        found = loss(rows, weights, mesh, choose)
        print(f"rank {rank}, {choose.__name__:12}: loss {found:.3f}, "
              f"one process {right:.3f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
