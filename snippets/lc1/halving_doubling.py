# torchrun --nproc-per-node 5 snippets/lc1/halving_doubling.py
import torch
import torch.distributed as dist

from xtrain import comm

dist.init_process_group("gloo")
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
