"""Five AdamW steps on shards equal five of one process on all four batches."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, say, sends
from xtrain.whiteboard.zero.zero_2 import Zero2


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5)).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return randn(3, 8, seed=10 * step + rank, dtype=torch.float64)


def check(rank: int, size: int) -> None:
    alone, model = model_of(0), model_of(rank)  # rank 0's weights go to all
    whole = torch.optim.AdamW(alone.parameters(), lr=0.02)
    sharded = Zero2(model.parameters(), torch.optim.AdamW, lr=0.02)
    for step in range(5):
        whole.zero_grad()
        for other in range(size):
            (alone(batch(step, other)).square().sum() / size).backward()
        whole.step()
        sharded.zero_grad()
        with Sent() as sent:
            model(batch(step, rank)).square().sum().backward()
            sharded.step()
    mine, expected = (
        torch.cat([p.detach().flatten() for p in m.parameters()])
        for m in (model, alone)
    )
    same("the weights after 5 steps are those of one process", mine, expected, 1e-12)
    held, full = (
        sum(t.nbytes for s in o.state.values() for t in s.values() if t.dim())
        for o in (sharded.optimizer, whole)
    )
    say(f"optimizer state on each rank: {held:,} bytes; of one process: {full:,}")
    nbytes = sum(flat.nbytes for flat, _ in sharded.shards.values())
    sends(sent, f"2(N-1)/N of {nbytes:,} bytes, padded", 2 * (size - 1) / size * nbytes)
