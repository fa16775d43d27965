# torchrun --nproc-per-node 2 snippets/wrong/lc2/no_sync_around_backward.py
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn


def accumulate(model, batches):
    """Meant: no messages before the last micro-batch."""
    for number, batch in enumerate(batches):
        loss = model(batch).square().mean()  # the bug: forward decides
        with nullcontext() if number == len(batches) - 1 else model.no_sync():
            loss.backward()


def forward_inside(model, batches):
    for number, batch in enumerate(batches):
        with nullcontext() if number == len(batches) - 1 else model.no_sync():
            model(batch).square().mean().backward()


def count_calls(accumulate):
    """How often torch's wrapper sends its bucket."""
    calls = []

    def hook(_, bucket):
        calls.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda done: done.value()[0] / 2)

    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 2))
    model.register_comm_hook(None, hook)
    accumulate(model, torch.ones(4, 3, 4) * (1 + dist.get_rank()))
    return len(calls), model.module.weight.grad.norm().item()


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    for which in (accumulate, forward_inside):
        calls, norm = count_calls(which)
        name = which.__name__
        print(f"rank {rank}, {name}: {calls} all-reduces, gradient {norm:.4f}")

    dist.barrier()
    dist.destroy_process_group()
