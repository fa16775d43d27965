"""Of data parallelism: five steps are those of one process on all batches."""

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler as TorchSampler

from xtrain.copying.self_checks.harness import Sent, gradient, randn, same, sends
from xtrain.copying.self_checks.training import five_steps, model_of


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


def check_distributed_data_parallel(form: Any, rank: int, size: int) -> None:
    """Five steps on every rank equal five steps of one process on all batches."""
    buckets = partial(form, bucket_cap_mb=0.005)  # three, in float64
    check_steps(buckets, rank, size, lambda parallel: None)
    alone, model = Halves(), Halves()
    asked = "find_unused_parameters"  # of those that want to be told
    told = {asked: True} if asked in inspect.signature(form).parameters else {}
    parallel = form(model, **told)
    alone.load_state_dict(model.state_dict())
    batches = [randn(3, 8, seed=r) for r in range(size)]
    for other, batch in enumerate(batches):
        (alone(batch, other).square().sum() / size).backward()
    parallel(batches[rank], rank).square().sum().backward()
    for p, q in zip(model.parameters(), alone.parameters(), strict=True):
        whole = torch.zeros_like(q) if q.grad is None else q.grad
        same("a gradient that not every rank has", gradient(p), whole)


class Halves(nn.Module):
    """Even ranks use one layer, odd ranks the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def forward(self, x: Tensor, rank: int) -> Any:
        return self.layers[rank % 2](x)


def check_distributed_sampler(form: Any, rank: int, size: int) -> None:
    """The sampler deals the indices that torch's sampler deals."""
    with Sent() as sent:
        for length in (1, 10, 101):
            for drop_last in (False, True):
                data: Any = range(length)
                ours = form(data, drop_last=drop_last)
                theirs: Any = TorchSampler(data, drop_last=drop_last)
                for epoch in (0, 1):
                    ours.set_epoch(epoch)
                    theirs.set_epoch(epoch)
                    mine, other = torch.tensor(list(ours)), torch.tensor(list(theirs))
                    assert torch.equal(mine, other), (length, drop_last, epoch)
    same("the indices of 1, 10 and 101 samples are torch's", mine, other, 0)
    sends(sent, "nothing", 0)


def check_naive_data_parallel(form: Any, rank: int, size: int) -> None:
    """Five steps on every rank equal five steps of one process on all batches."""
    check_steps(form, rank, size, lambda parallel: parallel.reduce_gradients())
