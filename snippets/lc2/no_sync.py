# torchrun --nproc-per-node 2 snippets/lc2/no_sync.py
import os
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.data_parallel import DistributedDataParallel

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
torch.manual_seed(0)
micro_batches = torch.randn(4, 3, 5).double()  # 4 micro-batches of 3 samples
micro_batches += rank


def accumulate(quiet: bool) -> tuple[torch.Tensor, int]:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(5, 2).double())
    with CommLedger() as ledger:
        for number, batch in enumerate(micro_batches):
            waits = quiet and number < 3
            with model.no_sync() if waits else nullcontext():
                (model(batch).square().sum() / 4).backward()
    return model.module.weight.grad, len(ledger.events)


every_time, calls = accumulate(quiet=False)
print(f"rank {rank}, reduced every time: {calls} all-reduces")
once, calls = accumulate(quiet=True)
print(f"rank {rank}, with no_sync:       {calls} all-reduce")
same = torch.allclose(every_time, once, rtol=0, atol=1e-12)
print(f"rank {rank}, the same gradient:  {same}")

dist.barrier()
dist.destroy_process_group()
