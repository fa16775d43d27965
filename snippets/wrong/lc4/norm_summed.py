# torchrun --nproc-per-node 2 snippets/wrong/lc4/norm_summed.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.comm.autograd import identity_all_reduce


def norm(x, weight):
    """RMSNorm of an x that every rank has whole."""
    weight = identity_all_reduce(weight)  # the bug: backward adds up equal gradients
    return F.rms_norm(x, weight.shape, weight)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    x = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    for name, function in (("one process", F.rms_norm), ("norm", norm)):
        weight = torch.ones(2, requires_grad=True)
        args = (x, (2,), weight) if function is F.rms_norm else (x, weight)
        function(*args).sum().backward()
        values = " ".join(f"{value:.3f}" for value in weight.grad.tolist())
        print(f"rank {rank}: gradient of the weight by {name:11} {values}")

    dist.barrier()
    dist.destroy_process_group()
