"""Five AdamW steps on shards equal five of one process on all four batches."""

import torch
import torch.distributed as dist
from torch import nn

from xtrain.copying.self_checks.harness import Sent, randn, same, say, sends
from xtrain.whiteboard.zero.fully_sharded import FullySharded


class Blocks(nn.Module):
    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(8, 16)
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = torch.tanh(layer(x)) + x
        return x


def batch(step: int, rank: int) -> torch.Tensor:
    return randn(3, 8, seed=10 * step + rank, dtype=torch.float64)


def check(rank: int, size: int) -> None:
    alone = Blocks(0).double()
    model = FullySharded(Blocks(rank).double())  # rank 0's weights go to all
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
    units = [m for m in model.modules() if isinstance(m, FullySharded)]
    for unit, bare in zip(units, [alone.first, *alone.layers], strict=True):
        parts = [torch.empty_like(unit.shard) for _ in range(size)]
        dist.all_gather(parts, unit.shard.detach())
        mine = torch.cat(parts)[: sum(s.numel() for s in unit.shapes.values())]
        expected = torch.cat([p.detach().flatten() for p in bare.parameters()])
        same("a block's weights after 5 steps", mine.detach(), expected, 1e-12)
    held = sum(p.nbytes for p in model.parameters())
    full = sum(p.nbytes for p in alone.parameters())
    say(f"weights on each rank: {held:,} bytes; of one process: {full:,}")
    nbytes = size * held
    sends(sent, f"3(N-1)/N of {nbytes:,} bytes, padded", 3 * (size - 1) / size * nbytes)
