"""Five AdamW steps on shards equal five of one process on all four batches."""

import torch
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, say, sends
from xtrain.whiteboard.zero.fully_sharded_prefetch import FullyShardedPrefetch


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)]).double()


def batch(step: int, rank: int) -> torch.Tensor:
    return randn(3, 8, seed=10 * step + rank, dtype=torch.float64)


def check(rank: int, size: int) -> None:
    alone, model = chain(), FullyShardedPrefetch(chain())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (alone, model)]
    for step in range(5):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for other in range(size):
            (alone(batch(step, other)).square().sum() / size).backward()
        with Sent() as sent:
            model(batch(step, rank)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
    for shard, block in zip(model.shards, alone, strict=True):
        whole = nn.utils.parameters_to_vector(block.parameters()).detach()
        expected = whole.chunk(size)[rank]
        same("a block's shard after 5 steps", shard.detach(), expected, 1e-12)
    held = sum(p.nbytes for p in model.parameters())
    say(f"weights on each rank: {held:,} bytes; of one process: {size * held:,}")
    formula = f"3(N-1)/N of {size * held:,} bytes"
    sends(sent, formula, 3 * (size - 1) / size * size * held)
