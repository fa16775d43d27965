# torchrun --nproc-per-node 5 snippets/lc1/halving_doubling.py
import os

import torch
import torch.distributed as dist

from xtrain import comm

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()

# Five ranks: rank 4 is beyond the largest power of two, so rank 0 takes its part.
tensor = torch.arange(8.0) + 100 * rank
with comm.CommLedger() as ledger:
    comm.halving_doubling_all_reduce(tensor)
assert torch.equal(tensor, size * torch.arange(8.0) + 100 * sum(range(size)))

events = [None] * size
dist.all_gather_object(events, ledger.events)
if rank == 0:
    for number, messages in enumerate(comm.message_rounds(events)):
        pairs = "  ".join(f"{m.src}->{m.dst}" for m in messages)
        elements = {m.nbytes // tensor.element_size() for m in messages}
        print(f"round {number}, {elements} elements: {pairs}")
    print(f"sum {tensor.tolist()}")

dist.barrier()
dist.destroy_process_group()
