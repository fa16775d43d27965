"""Shared by both wrappers: weights and gradients after five steps, and their bytes."""

from collections.abc import Callable
from typing import Any

import torch

from xtrain.copying.self_checks.data_parallel.training import five_steps, model_of
from xtrain.copying.self_checks.harness import gradient, same, sends


def check_steps(form: Any, rank: int, size: int, reduce: Callable[[Any], None]) -> None:
    alone, model = (model_of(seed, 8, 32, 32, 4) for seed in (0, rank))
    parallel = form(model)  # rank 0's weights go to all
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (alone, model)]
    sent, _ = five_steps(
        alone, parallel, optimizers, rank, size, lambda: reduce(parallel)
    )
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        same(f"weights of shape {tuple(p.shape)} after 5 steps", p.data, q.data)
        same("their gradients", gradient(p), gradient(q))
    nbytes = sum(p.nbytes for p in model.parameters())
    sends(sent, "2(N-1)/N of the gradients a step", 2 * (size - 1) / size * nbytes)
