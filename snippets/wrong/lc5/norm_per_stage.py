# torchrun --nproc-per-node 2 snippets/wrong/lc5/norm_per_stage.py
import os

import torch
import torch.distributed as dist
from torch import nn


def clip(stage, max_norm):
    """Torch's function, on the parameters of this rank's stage."""
    return nn.utils.clip_grad_norm_(stage.parameters(), max_norm)  # the bug: its norm


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    stage = nn.Linear(2, 1, bias=False)
    stage.weight.grad = torch.tensor([[3.0, 4.0], [0.0, 12.0]])[rank : rank + 1]
    norm = clip(stage, max_norm=1.0)
    grad = [f"{value:.2f}" for value in stage.weight.grad.tolist()[0]]
    print(f"rank {rank}: norm {norm:.0f}, gradient {grad}, right is a norm of 13")

    dist.barrier()
    dist.destroy_process_group()
