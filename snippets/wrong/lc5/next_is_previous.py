# torchrun --nproc-per-node 2 snippets/wrong/lc5/next_is_previous.py
import os

import torch
import torch.distributed as dist


def swap_both_ways(output, gradient, ranks):
    """In a loop of stages: outputs go to the next rank, gradients to the one before."""
    rank = dist.get_rank()
    after, before = (rank + 1) % ranks, (rank - 1) % ranks
    new_input, new_gradient = torch.empty_like(output), torch.empty_like(gradient)
    calls = [
        dist.P2POp(dist.isend, output, after),
        dist.P2POp(dist.isend, gradient, before),
        # the bug: on two ranks this is the second message from there
        dist.P2POp(dist.irecv, new_gradient, after),
        dist.P2POp(dist.irecv, new_input, before),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return new_input, new_gradient


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    output, gradient = torch.tensor([10.0 + rank]), torch.tensor([-10.0 - rank])
    x, dy = swap_both_ways(output, gradient, size)
    print(f"rank {rank} of {size}: input {x.item():.0f}, gradient {dy.item():.0f}")

    dist.barrier()
    dist.destroy_process_group()
