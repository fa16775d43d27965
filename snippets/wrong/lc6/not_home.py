# torchrun --nproc-per-node 3 snippets/wrong/lc6/not_home.py
import os

import torch
import torch.distributed as dist


def rotate(x):
    """To the next rank; what comes from the one before."""
    rank, size, came = dist.get_rank(), dist.get_world_size(), torch.empty_like(x)
    if size == 1:
        return x
    calls = [
        dist.P2POp(dist.isend, x, (rank + 1) % size),
        dist.P2POp(dist.irecv, came, (rank - 1) % size),
    ]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    return came


def backward(dO, q, k, v, out, lse, go_home=False):
    """This rank's dq, dk, dv of softmax(q k^T) v over the keys of all ranks."""
    size, D = dist.get_world_size(), (dO * out).sum(-1, keepdim=True)
    kv, dq = torch.stack([k, v]), torch.zeros_like(q)
    dkv = torch.zeros_like(kv)
    for step in range(size):
        keys, values = kv
        P = (q @ keys.mT - lse.unsqueeze(-1)).exp()
        dS = P * (dO @ values.mT - D)
        dq += dS @ keys
        dkv += torch.stack([dS.mT @ q, P.mT @ dO])
        if step < size - 1:  # the bug: true of the keys, but not of their gradients
            kv, dkv = rotate(kv), rotate(dkv)
    if go_home:
        dkv = rotate(dkv)
    return dq, *dkv


if __name__ == "__main__":
    if torch.accelerator.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"]):
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device(torch.accelerator.current_accelerator())
    backend = dist.get_default_backend_for_device(torch.get_default_device())
    dist.init_process_group(backend)
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    q, k, v = (torch.randn(6, 4, requires_grad=True) for _ in range(3))
    dO, scores = torch.randn(6, 4), q @ k.mT
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    whole = torch.autograd.grad(out, (q, k, v), dO, retain_graph=True)
    mine = [x.detach().chunk(size)[rank] for x in (dO, q, k, v, out, lse)]
    for name, grad, full in zip(("dq", "dk", "dv"), backward(*mine), whole):
        of = [r for r in range(size) if torch.allclose(grad, full.chunk(size)[r],
                                                       atol=1e-5)]  # fmt: skip
        print(f"rank {rank}: its {name} is that of rank {of[0]}")

    dist.barrier()
    dist.destroy_process_group()
