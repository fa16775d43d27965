# torchrun --nproc-per-node 2 snippets/wrong/lc5/slot_for_micro_batch.py
import torch
import torch.distributed as dist
from torch import nn


def one_f_one_b(stage, loss_fn, inputs, targets, m, activation):
    """Backward i - warm_up follows forward i; as many slots as ranks keep outputs."""
    rank, size = dist.get_rank(), dist.get_world_size()
    warm_up = size - 1 - rank
    xs, slots, sends = [], [None] * size, []
    for i in range(m + warm_up):
        if i < m:
            x = inputs.chunk(m)[i] if rank == 0 else torch.empty_like(activation)
            if rank > 0:
                dist.recv(x, rank - 1)
            xs.append(x.requires_grad_(rank > 0))
            y = stage(x)
            if rank < size - 1:
                sends.append(dist.isend(y.detach(), rank + 1))
            else:
                y = loss_fn(y, targets.chunk(m)[i])[0] / len(targets)
            slots[i % size] = y
        if i >= warm_up:
            slot = (i - warm_up) % size
            dy = None if rank == size - 1 else torch.empty_like(activation)
            if dy is not None:
                dist.recv(dy, rank + 1)
            slots[slot].backward(dy)
            if rank > 0:  # the bug: a slot, in the list of all micro-batches
                sends.append(dist.isend(xs[slot].grad, rank - 1))
    for send in sends:
        send.wait()


def loss_fn(output, target):
    return (output - target).square().sum(), len(target)


if __name__ == "__main__":
    # On gloo: NCCL runs the messages of two ranks in the order of the calls.
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for m in (1, 2, 3, 4, 5):
        torch.manual_seed(0)
        stages = [nn.Linear(3, 3) for _ in range(2)]
        x, target = torch.randn(m, 3), torch.randn(m, 3)
        whole = loss_fn(stages[1](stages[0](x)), target)[0] / m
        right = torch.autograd.grad(whole, stages[rank].weight)[0]
        one_f_one_b(stages[rank], loss_fn, x, target, m, torch.empty(1, 3))
        off = (stages[rank].weight.grad - right).norm() / right.norm()
        print(f"rank {rank}, {m} micro-batches: gradient off by {off:.0%}")

    dist.barrier()
    dist.destroy_process_group()
