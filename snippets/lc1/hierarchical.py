# torchrun --nproc-per-node 4 snippets/lc1/hierarchical.py
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

# Two nodes of two ranks: 0 1 | 2 3. Think of the bar as the slow links.
mesh = comm.init_mesh((2, 2), ("node", "local"))
intra, inter = mesh["local"].get_group(), mesh["node"].get_group()
data = torch.full((1024,), 10.0**rank)


def crossing(events):
    """Bytes that left this rank for the other node."""
    sends = [e for e in events if e.kind == "send" and e.peer // 2 != rank // 2]
    return sum(e.nbytes for e in sends)


flat, by_node = data.clone(), data.clone()
with comm.CommLedger() as flat_ledger:
    comm.ring_all_reduce(flat)
with comm.CommLedger() as node_ledger:
    comm.hierarchical_all_reduce(by_node, intra_group=intra, inter_group=inter)
assert torch.equal(flat, by_node)
assert (flat == 1111.0).all()

counts = [None] * size
both = (crossing(flat_ledger.events), crossing(node_ledger.events))
dist.all_gather_object(counts, both)
if rank == 0:
    print(f"bytes over the bar, rank by rank, for a tensor of {data.nbytes} bytes")
    print(f"flat ring:    {[ring for ring, _ in counts]}")
    print(f"hierarchical: {[nodes for _, nodes in counts]}")

dist.barrier()
dist.destroy_process_group()
