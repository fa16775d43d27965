"""Five AdamW steps on shards equal five of one process on all batches."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.copying.self_checks.data_parallel.training import five_steps, flat
from xtrain.copying.self_checks.harness import Here, same, say, sends


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


def check(form: Any, rank: int, size: int) -> None:
    alone, model = Blocks(0), form(Blocks(rank))  # rank 0's weights go to all
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (alone, model)]
    sent, _ = five_steps(alone, model, optimizers, rank, size)
    units = [m for m in model.modules() if isinstance(m, type(model))]
    for unit, bare in zip(units, [alone.first, *alone.layers], strict=True):
        parts = [torch.empty_like(unit.shard) for _ in range(size)]
        dist.all_gather(parts, unit.shard.detach(), Here.group)
        mine = torch.cat(parts)[: sum(s.numel() for s in unit.shapes.values())]
        same("a block's weights after 5 steps", mine.detach(), flat(bare))
    held, full = (sum(p.nbytes for p in m.parameters()) for m in (model, alone))
    say(f"weights on each rank: {held:,} bytes; of one process: {full:,}")
    nbytes = size * held
    sends(sent, "3(N-1)/N of the parameters a step", 3 * (size - 1) / size * nbytes)
