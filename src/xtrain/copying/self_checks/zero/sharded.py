"""Shared by stages 1 and 2: weights after five steps, and the state's memory."""

from typing import Any

import torch

from xtrain.copying.self_checks.data_parallel.training import (
    five_steps,
    flat,
    model_of,
)
from xtrain.copying.self_checks.harness import Sent, same, say


def train(form: Any, rank: int, size: int) -> tuple[Any, Sent, Sent]:
    """The sharded optimizer, and what its last backward and its last step sent."""
    alone, model = (model_of(seed, 8, 32, 5) for seed in (0, rank))
    whole = torch.optim.AdamW(alone.parameters(), lr=0.02)
    zero = form(model.parameters(), torch.optim.AdamW, lr=0.02)  # rank 0's weights
    back, stepped = five_steps(alone, model, [whole, zero], rank, size)
    same("the weights after 5 steps are one process's", flat(model), flat(alone))
    held, full = (
        sum(t.nbytes for s in o.state.values() for t in s.values() if t.dim())
        for o in (zero.optimizer, whole)
    )
    say(f"optimizer state on each rank: {held:,} bytes; of one process: {full:,}")
    return zero, back, stepped
