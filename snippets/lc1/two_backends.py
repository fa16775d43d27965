# torchrun --nproc-per-node 2 snippets/lc1/two_backends.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
beside = dist.new_group(backend="gloo")  # the same ranks, for what is on the CPU

gradient = torch.full((1000,), 1.0 + rank)  # on the GPU, if there is one for each rank
work = dist.all_reduce(gradient, async_op=True)
with CommLedger() as ledger:  # meanwhile, without any GPU
    tokens = torch.tensor(100 + rank, device="cpu")
    dist.all_reduce(tokens, group=beside)
    metrics = [None] * size
    dist.all_gather_object(metrics, {"rank": rank, "loss": 2.5 - rank}, group=beside)
work.wait()

if rank == 0:
    print(f"over {dist.get_backend()}: gradient {gradient[0].item()}")
    print(f"over {dist.get_backend(beside)}: {tokens.item()} tokens, metrics {metrics}")
    for event in ledger.events:
        print(f"  {event.op} of {event.payload} bytes")
dist.barrier(beside)
dist.destroy_process_group()
