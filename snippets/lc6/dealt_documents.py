# torchrun --nproc-per-node 4 snippets/lc6/dealt_documents.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.context_parallel import (
    deal_documents,
    ring_attention,
    sequence_mask,
    shard_sequence,
)

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
lengths = torch.tensor([37, 5, 9, 13])  # four documents in one sequence
documents = torch.arange(4).repeat_interleave(lengths).unsqueeze(0)
place = torch.cat([torch.arange(int(length)) for length in lengths])
q, k, v = torch.randn(3, 1, 2, len(place), 4, dtype=torch.float64)

seen = (documents == documents.mT).tril()
expected = q
for _ in range(2):  # two layers
    expected = F.scaled_dot_product_attention(expected, k, v, attn_mask=seen)

for name in ("zigzag", "dealt"):
    balance = deal_documents(documents, size) if name == "dealt" else name
    x, keys, values = (shard_sequence(t, 2, balance) for t in (q, k, v))
    ids = shard_sequence(documents, 1, balance)
    mask = sequence_mask(len(place) // size, balance=balance, documents=ids)
    for _ in range(2):  # planned once, used by both
        x = ring_attention(x, keys, values, balance=balance, mask=mask)

    equal = torch.allclose(x, shard_sequence(expected, 2, balance))
    pairs = int(
        shard_sequence(place + 1, 0, balance).sum()
    )  # a token sees its document
    print(f"rank {rank}, {name}: {pairs} pairs a layer, equal: {equal}")
    dist.barrier()
dist.destroy_process_group()
