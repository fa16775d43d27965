# torchrun --nproc-per-node 4 snippets/lc1/ring_all_reduce.py
import os

import torch
import torch.distributed as dist

from xtrain.comm import CommLedger, ring_all_reduce

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# Element c on rank r is 10^r * (c + 1): the sum shows who added what, and where.
tensor = torch.arange(1.0, size + 1) * 10**rank
print(f"rank {rank} has {tensor.tolist()}")

with CommLedger() as ledger:
    ring_all_reduce(tensor)
print(f"rank {rank} got {tensor.tolist()}")
print(f"  {ledger.messages} messages, {ledger.bytes_sent} bytes sent")

expected = torch.arange(1.0, size + 1) * sum(10**r for r in range(size))
assert torch.equal(tensor, expected)
# Two halves of N-1 steps, each sends one of N chunks.
assert ledger.bytes_sent == 2 * (size - 1) * tensor.nbytes // size

dist.barrier()
dist.destroy_process_group()
