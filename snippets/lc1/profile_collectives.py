# torchrun --nproc-per-node 2 snippets/lc1/profile_collectives.py
import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from xtrain.comm import CommLedger, ring_all_reduce

# On gloo, whose events the profiler calls gloo:...
dist.init_process_group("gloo")
rank = dist.get_rank()
tensor = torch.zeros(1 << 20)
ring_all_reduce(tensor)  # once before, so that connections and buffers are there

# The profiler knows when and how long, the ledger how much and to whom.
with profile(activities=[ProfilerActivity.CPU]) as timeline, CommLedger() as ledger:
    ring_all_reduce(tensor)
    dist.all_reduce(tensor)

if rank == 0:
    for entry in sorted(timeline.key_averages(), key=lambda entry: entry.key):
        if entry.key.startswith("gloo:"):
            timed = entry.cpu_time_total > 0
            print(f"{entry.key:16} {entry.count} times, timed: {timed}")
    for event in ledger.events:
        print(f"{event.op:10} peer {event.peer}, {event.payload} bytes")

dist.barrier()
dist.destroy_process_group()
