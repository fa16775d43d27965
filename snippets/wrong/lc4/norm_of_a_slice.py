# torchrun --nproc-per-node 2 snippets/wrong/lc4/norm_of_a_slice.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F


def norm(x, weight):
    """RMSNorm of this rank's slice of the sequence."""
    return F.rms_norm(x, weight.shape, weight)  # the bug: the gradient of my tokens


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    sequence = torch.randn(1, 6, 2)
    weight = torch.ones(2, requires_grad=True)
    for step in range(3):
        x = sequence.chunk(2, 1)[rank]
        norm(x, weight).square().sum().backward()
        weight.data.sub_(0.05 * weight.grad)
        weight.grad = None
        values = " ".join(f"{value:.3f}" for value in weight.tolist())
        print(f"rank {rank}, after step {step}: weight {values}")

    dist.barrier()
    dist.destroy_process_group()
