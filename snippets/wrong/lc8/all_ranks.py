# torchrun --nproc-per-node 4 snippets/wrong/lc8/all_ranks.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import init_mesh


def of_all(grad, mesh):
    """The mean of the data ranks' gradients."""
    dist.all_reduce(grad)  # the bug: tensor ranks hold other columns
    return grad / dist.get_world_size()


def by_all(grad, mesh):
    dist.all_reduce(grad, group=mesh["data"].get_group())
    return grad / dist.get_world_size()  # the bug: two ranks are added, not four


def of_data(grad, mesh):
    dist.all_reduce(grad, group=mesh["data"].get_group())
    return grad / mesh["data"].size()


def columns(whole, mesh):
    """This tensor rank's columns."""
    tensor = mesh["tensor"]
    return whole.chunk(tensor.size(), 1)[tensor.get_local_rank()]


def gradient(rows, weight, mesh, rule):
    """Of the mean square of this data rank's rows, for this rank's columns."""
    data = mesh["data"]
    x = rows.chunk(data.size())[data.get_local_rank()]
    return rule(2 * x.T @ x @ columns(weight, mesh) / len(x), mesh)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    mesh, rank = init_mesh((2, 2), ("data", "tensor")), dist.get_rank()
    torch.manual_seed(0)
    rows, weight = torch.randn(8, 4), torch.randn(4, 6)
    right = columns(2 * rows.T @ rows @ weight / len(rows), mesh)
    for rule in (of_all, by_all, of_data):
        found = gradient(rows, weight, mesh, rule)
        print(f"rank {rank}, {rule.__name__:7}: length "
              f"{found.norm() / right.norm():.2f} of the right one, error "
              f"{(found - right).norm() / right.norm():.2f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
