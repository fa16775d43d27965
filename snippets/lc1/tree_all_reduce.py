# torchrun --nproc-per-node 8 snippets/lc1/tree_all_reduce.py
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


def run(algorithm):
    """One checked all-reduce: its messages by round, and bytes sent by each rank."""
    tensor = torch.arange(8.0) + 100 * rank
    expected = size * torch.arange(8.0) + 100 * sum(range(size))
    with comm.CommLedger() as ledger:
        algorithm(tensor)
    assert torch.equal(tensor, expected)
    ledgers = [None] * size
    dist.all_gather_object(ledgers, (ledger.events, ledger.bytes_sent))
    events, sent = zip(*ledgers, strict=True)
    return comm.message_rounds(events), sent


tree, tree_sent = run(comm.tree_all_reduce)
ring, ring_sent = run(comm.ring_all_reduce)
if rank == 0:
    for number, messages in enumerate(tree):
        pairs = "  ".join(f"{m.src}->{m.dst}" for m in messages)
        print(f"tree, round {number}: {pairs}")
    print(f"tree: {len(tree)} rounds, the busiest rank sends {max(tree_sent)} bytes")
    print(f"ring: {len(ring)} rounds, the busiest rank sends {max(ring_sent)} bytes")

dist.barrier()
dist.destroy_process_group()
