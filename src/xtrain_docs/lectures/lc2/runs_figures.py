"""Functions that run on every rank for the figures of lc2, the clock's apart."""

import contextlib
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm import CommLedger
from xtrain.comm.collective_choice import TORCH
from xtrain.data_parallel import (
    DistributedDataParallel,
    DistributedSampler,
    NaiveDataParallel,
)

from .runs import deep_net


def one_step(samples: int) -> dict[str, Any]:
    """One step of naive data parallelism, as this rank sees it.

    A gradient here is that of one weight of the first layer.
    """
    rank = dist.get_rank()
    mine = list(DistributedSampler(range(samples)))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(samples, 8, generator=generator)[mine]
    torch.manual_seed(rank)  # its own weights, until the wrapper copies rank 0's
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)]
    model = NaiveDataParallel(nn.Sequential(*layers, nn.Linear(8, 1)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    weight: Any = layers[0][0].weight

    def first(tensor: torch.Tensor) -> float:
        return round(tensor[0, 0].item(), 4)

    loss = (model(data) - data.sum(1, keepdim=True)).square().mean()
    loss.backward()
    seen = {"samples": mine, "loss": round(loss.item(), 3), "own": first(weight.grad)}
    model.reduce_gradients()
    seen["mean"] = first(weight.grad)
    optimizer.step()
    return seen | {"weight": first(weight.detach())}


def dealt(length: int, drop_last: bool) -> list[int]:
    """The samples of this rank in epoch 0."""
    return list(DistributedSampler(range(length), drop_last=drop_last))


def gradient_by_what_is_reduced() -> dict[str, float]:
    """The gradient of a weight whose loss is the weight times this rank's sample."""
    sample = 3.0 + 2 * dist.get_rank()
    found = {}
    for reduced in ("nothing", "loss", "gradient"):
        weight = torch.tensor(1.0, requires_grad=True)
        loss = weight * sample
        if reduced == "loss":
            dist.all_reduce(loss.detach())
            loss.detach().div_(dist.get_world_size())
        loss.backward()
        assert weight.grad is not None
        if reduced == "gradient":
            dist.all_reduce(weight.grad)
            weight.grad /= dist.get_world_size()
        found[reduced] = weight.grad.item()
    return found


def weighed(tokens: list[list[float]]) -> dict[str, float]:
    """The mean loss over all ranks' tokens by two ways, as the gradient has it."""
    mine = torch.tensor(tokens[dist.get_rank()]).view(-1, 1)
    count = torch.tensor(len(mine))
    dist.all_reduce(count)

    def gradient(reduction: str, divide_by: float) -> float:
        layer = nn.Linear(1, 1, bias=False)
        model = DistributedDataParallel(layer, gradient_reduction=reduction)
        (model(mine).sum() / divide_by).backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.item()

    return {
        "means": gradient("average", len(mine)),
        "sums": gradient("sum", count.item()),
    }


def collectives_by_micro_batch(micro_batches: int, no_sync: bool) -> list[list[int]]:
    """The bytes of each all-reduce, by the micro-batch whose backward it is in."""
    model = DistributedDataParallel(deep_net(), bucket_cap_mb=0.05)
    seen = []
    for number in range(micro_batches):
        waits = no_sync and number < micro_batches - 1
        with (
            CommLedger() as ledger,
            model.no_sync() if waits else contextlib.nullcontext(),
        ):
            model(torch.ones(2, 64)).sum().backward()
        seen.append([event.payload for event in ledger.events])
    return seen


def spied(seen: list[str]) -> Any:
    """torch's collectives; each all-reduce of a bucket is noted."""

    def all_reduce(flat: torch.Tensor, group: Any = None) -> Any:
        seen.append("sent")
        return dist.all_reduce(flat, group=group, async_op=True)

    return replace(TORCH, name="spied", all_reduce=all_reduce)


class Skipping(nn.Module):
    """Four layers; a forward leaves out those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor, skipped: list[int]) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            x = x if number in skipped else layer(x)
        return x


def a_layer_is_skipped(skipped: int) -> list[str]:
    """What happens in a backward, in order, when the last rank skips a layer."""
    seen: list[str] = []
    net = Skipping()
    for number, layer in enumerate(net.layers):
        layer.weight.register_post_accumulate_grad_hook(
            lambda _, number=number: seen.append(f"gradient {number}")
        )
    two_layers = 2 * 16 * 4 / 2**20
    model = DistributedDataParallel(
        net, bucket_cap_mb=two_layers, collectives=spied(seen)
    )
    last = dist.get_rank() == dist.get_world_size() - 1
    loss = model(torch.ones(1, 4), [skipped] if last else []).sum()
    try:
        loss.backward()
    except RuntimeError:
        seen.append("error")
    return seen


def joined(batches: list[int]) -> list[list[Any]]:
    """Steps of this rank inside `join`: [kind, its gradient, what all ranks get]."""
    mine = batches[dist.get_rank()]
    seen: list[list[Any]] = []
    layer = nn.Linear(1, 1, bias=False)
    counted: list[str] = []
    model = DistributedDataParallel(layer, collectives=spied(counted))
    with model.join():
        for step in range(mine):
            layer.weight.grad = None
            model(torch.full((1, 1), 1.0 + step)).sum().backward()
            assert layer.weight.grad is not None
            seen.append(["batch", 1.0 + step, layer.weight.grad.item()])
    shadows = len(counted) - mine
    return seen + [["shadow", 0.0, 0.0]] * shadows
