"""Five AdamW steps on shards equal five of one process on all batches."""

from typing import Any

import torch
from torch import nn

from xtrain.copying.self_checks.data_parallel.training import five_steps, flat
from xtrain.copying.self_checks.harness import same, say, sends


def chain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(8, 8) for _ in range(4)])


def check(form: Any, rank: int, size: int) -> None:
    alone, model = chain(), form(chain())
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.02) for m in (alone, model)]
    sent, _ = five_steps(alone, model, optimizers, rank, size)
    for shard, block in zip(model.shards, alone, strict=True):
        whole = flat(block).chunk(size)[rank]
        same("a block's shard after 5 steps", shard.detach(), whole)
    held = sum(p.nbytes for p in model.parameters())
    say(f"weights on each rank: {held:,} bytes; of one process: {size * held:,}")
    sends(sent, "3(N-1)/N of the parameters a step", 3 * (size - 1) * held)
