# torchrun --nproc-per-node 2 snippets/wrong/lc4/norm_of_a_slice.py
import torch
import torch.distributed as dist
import torch.nn.functional as F


def norm(x, weight):
    """RMSNorm of this rank's slice of the sequence."""
    return F.rms_norm(x, weight.shape, weight)  # the bug: the gradient of my tokens


if __name__ == "__main__":
    dist.init_process_group("gloo")
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
