# torchrun --nproc-per-node 2 snippets/wrong/lc2/last_inside_no_sync.py
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.data_parallel import DistributedDataParallel


def accumulate(model, batches):
    """Meant: no messages before the last micro-batch."""
    for number, batch in enumerate(batches):
        last = number == len(batches)  # the bug: numbers end at len(batches) - 1
        with nullcontext() if last else model.no_sync():
            loss = model(batch).square().mean() / len(batches)
            loss.backward()
    return loss


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(1 + rank)
    for step in range(3):
        optimizer.zero_grad()
        with CommLedger() as ledger:
            loss = accumulate(model, torch.randn(4, 3, 4))
        optimizer.step()
        calls, norm = len(ledger.events), model.module.weight.norm()
        print(f"rank {rank}, step {step}: loss {loss:.4f}, "
              f"{calls} all-reduces, norm of the weights {norm:.4f}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
