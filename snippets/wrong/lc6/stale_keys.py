# torchrun --nproc-per-node 2 snippets/wrong/lc6/stale_keys.py
import os

import torch
import torch.distributed as dist

from xtrain.whiteboard.context_parallel.ring_attention_backward import (
    ring_attention_backward,
)


def receive_into(kv, sent):
    """From the rank before, while `sent` goes to the next one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    calls = [
        dist.P2POp(dist.isend, sent, (rank + 1) % size),
        dist.P2POp(dist.irecv, kv, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()


def forward(q, kv):
    """Causal, over runs of the sequence: out, and its log-sum-exp."""
    rank, size, length = dist.get_rank(), dist.get_world_size(), q.shape[2]
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for step in range(size):
        keys, values = kv
        hidden = torch.full((length, length), -torch.inf).to(q)
        hidden = hidden.triu(1 + length * (step if step <= rank else step - size))
        scores = q @ keys.mT * q.shape[3] ** -0.5 + hidden
        total = torch.logaddexp(lse, scores.logsumexp(-1, keepdim=True))
        out = out * (lse - total).exp() + (scores - total).exp() @ values
        lse = total
        if step < size - 1:
            receive_into(kv, kv.clone())  # the bug: kv is what backward begins with
    return out, lse.squeeze(-1)


def attention(q, k, v, grad, copied=False):
    kv = torch.stack([k, v])
    out, lse = forward(q, kv.clone() if copied else kv)
    return out, *ring_attention_backward(grad, q, kv[0], kv[1], out, lse)


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, 1, 6, 4, requires_grad=True) for _ in range(4))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    whole = [out, *torch.autograd.grad(out, (q, k, v), grad)]
    mine = [x.detach().chunk(size, 2)[rank] for x in (q, k, v, grad)]
    for copied in (False, True):
        found = zip(attention(*mine, copied), whole)
        wrong = [(x - y.chunk(size, 2)[rank]).norm() / y.norm() for x, y in found]
        how = "into a copy" if copied else "in place"
        print(f"rank {rank}, received {how:11}: error of out, dq, dk, dv "
              f"{[f'{x:.2f}' for x in wrong]}")  # fmt: skip

    dist.barrier()
    dist.destroy_process_group()
