# torchrun --nproc-per-node 4 snippets/lc6/three_ways.py
import torch
import torch.distributed as dist
import torch.nn.functional as F

import xtrain.backends  # noqa: F401  (its sockets count what a collective sends)
from xtrain import context_parallel as cp
from xtrain.comm import CommLedger
from xtrain.plan import context_bytes

dist.init_process_group("xtrain-socket")
rank, ranks, local = dist.get_rank(), dist.get_world_size(), 64
ways = {
    "ring": cp.ring_attention,
    "all_gather": cp.all_gather_attention,
    "ulysses": cp.ulysses_attention,
}


def count(ledger):
    """Bytes sent, without the all-reduce by which all ranks check the call."""
    sent = (e for e in ledger.events if e.kind != "recv" and e.op != "allreduce")
    return sum(e.nbytes for e in sent)


for heads, key_heads in ((8, 8), (8, 2)):
    torch.manual_seed(0)
    q, grad = torch.randn(2, 1, heads, ranks * local, 16)
    k, v = torch.randn(2, 1, key_heads, ranks * local, 16)
    whole = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    for name, attention in ways.items():
        mine = [cp.shard_sequence(t, 2).requires_grad_() for t in (q, k, v)]
        with CommLedger() as forward:
            out = attention(*mine)
        with CommLedger() as backward:
            out.backward(cp.shard_sequence(grad, 2))
        equal = torch.allclose(out, cp.shard_sequence(whole, 2), atol=1e-5)
        formula = context_bytes(name, local, heads, key_heads, 16, ranks, itemsize=4)
        sent = count(forward), count(backward)
        if rank == 0:
            print(
                f"{heads} heads, {key_heads} key heads, {name}: sends {sent[0]} and "
                f"{sent[1]} bytes, by formula: {sent == formula}; equal: {equal}"
            )
dist.destroy_process_group()
