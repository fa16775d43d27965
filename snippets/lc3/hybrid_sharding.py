# torchrun --nproc-per-node 4 snippets/lc3/hybrid_sharding.py
import os

import torch
import torch.distributed as dist
from torch import nn

from xtrain import comm, zero

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank = dist.get_rank()
ring = comm.collective_choice.RING  # lecture 1's, whose bytes are counted


def deep():
    return nn.Sequential(*[nn.Linear(8, 8, bias=False) for _ in range(3)])


torch.manual_seed(rank)
inner, outer = zero.hybrid.hybrid_groups(2)  # as if two ranks were a node
near, far = map(dist.get_process_group_ranks, (inner, outer))
print(f"rank {rank}: shards with {near}, the same shard on {far}")

model = zero.FullyShardedDataParallel(
    deep(), inner, replicate_group=outer, blocks=[nn.Linear], collectives=ring
)
optimizer = zero.AdamW(model.parameters(), lr=0.01)
with comm.CommLedger() as ledger:
    with model.no_all_reduce():  # a micro-batch: nothing leaves the node
        model(torch.randn(4, 8)).square().mean().backward()
    model(torch.randn(4, 8)).square().mean().backward()
norm = model.clip_grad_norm_(1.0)
optimizer.step()

sent = {True: 0, False: 0}
for event in ledger.events:
    if event.kind == "send":
        sent[event.peer in near] += event.nbytes
P, n, m, K = 3 * 64 * 4, 2, 2, 2  # bytes, ranks of a copy, copies, micro-batches
assert sent[True] == K * 3 * (n - 1) * P // n
assert sent[False] == 2 * (m - 1) * P // n // m
held = sum(p.numel() for p in model.parameters())
print(f"rank {rank}: holds {held} of {3 * 64} elements; gradient norm {norm:.6f}")
print(f"rank {rank}: sends {sent[True]} bytes in the node, {sent[False]} out of it")

dist.barrier()
dist.destroy_process_group()
