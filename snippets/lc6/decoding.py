# torchrun --nproc-per-node 4 snippets/lc6/decoding.py
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from xtrain.comm import CommLedger
from xtrain.context_parallel import ring_attention, ring_online_softmax, shard_sequence

if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
    torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    torch.set_default_device(torch.accelerator.current_accelerator())
backend = dist.get_default_backend_for_device(torch.get_default_device())
dist.init_process_group(backend)
rank, size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
prompt, new, heads, key_heads, dim = 64, 5, 4, 2, 8

q = torch.randn(1, heads, prompt + new, dim, dtype=torch.float64)
k, v = torch.randn(2, 1, key_heads, prompt + new, dim, dtype=torch.float64)
whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def sent(ledger):
    return sum(event.nbytes for event in ledger.events if event.op == "send")


def cut(x):
    return shard_sequence(x[:, :, :prompt], 2, "zigzag")


# Prefill: the ring once, without gradients. The keys stay where they are: the cache.
keys, values = cut(k), cut(v)
with torch.no_grad(), CommLedger() as ledger:
    out = ring_attention(cut(q), keys, values, balance="zigzag")
equal, prefill = [torch.allclose(out, cut(whole))], sent(ledger)

# Decoding: the query is on every rank, a new key on one of them, by turns.
for place in range(prompt, prompt + new):
    now = slice(place, place + 1)
    if place % size == rank:
        keys = torch.cat([keys, k[:, :, now]], 2)
        values = torch.cat([values, v[:, :, now]], 2)
    repeated = [t.repeat_interleave(heads // key_heads, 1) for t in (keys, values)]
    scores = q[:, :, now] @ repeated[0].mT * dim**-0.5
    with CommLedger() as ledger:  # outputs and log-sum-exps go round, and no keys
        out, _ = ring_online_softmax(scores, repeated[1])
    equal.append(torch.allclose(out, whole[:, :, now]))

cached = keys.nbytes + values.nbytes
print(f"rank {rank}: prefill sent {prefill} bytes; {keys.shape[2]} of {prompt + new} "
      f"keys cached, {cached} bytes; a token sent {sent(ledger)}; "
      f"equal: {all(equal)}")  # fmt: skip

dist.barrier()
dist.destroy_process_group()
