"""Five steps on four ranks equal five steps of one process on all four batches."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, sends
from xtrain.whiteboard.data_parallel.distributed_data_parallel import (
    DistributedDataParallel,
)


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(32, 4)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return randn(3, 8, seed=10 * step + rank, dtype=torch.float64)


def check(rank: int, size: int) -> None:
    alone, model = model_of(0), model_of(rank)  # rank 0's weights go to all
    parallel = DistributedDataParallel(model, bucket_cap_mb=0.005)  # 3 buckets
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for other in range(size):
            (alone(batch(step, other)).square().sum() / size).backward()
        with Sent() as sent:
            parallel(batch(step, rank)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        same(f"weights of shape {tuple(p.shape)} after 5 steps", p.data, q.data, 1e-12)
        same("their gradients", p.grad, q.grad, 1e-12)
    nbytes = sum(p.nbytes for p in model.parameters())
    sends(sent, f"2(N-1)/N of {nbytes:,} bytes", 2 * (size - 1) / size * nbytes)
