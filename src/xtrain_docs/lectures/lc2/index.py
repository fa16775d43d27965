"""One step of data parallelism, as every rank sees it."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.data_parallel import DistributedSampler, NaiveDataParallel

from ... import runs
from ...figures import REGISTRY
from ...svg import document, line, text
from .boxes import WIDTH, Box, boxed


def one_step(samples: int) -> dict[str, Any]:
    """Samples, loss, and one weight of the first layer with its gradient."""
    mine = list(DistributedSampler(range(samples)))
    generator = torch.Generator().manual_seed(0)
    data = torch.randn(samples, 8, generator=generator)[mine]
    torch.manual_seed(dist.get_rank())  # the wrapper copies rank 0's weights
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
    return seen | {"weight": first(weight)}


@REGISTRY
def data_parallel_step(ranks: int = 3) -> str:
    """From samples to new weights: a column for each rank, a box where they talk."""
    found = runs.remembered(one_step, ranks, 4 * ranks)
    wide = (WIDTH - 4) / ranks
    parts: list[str] = []
    told = []
    for rank, seen in enumerate(found):
        x, middle = 4 + wide * rank, wide * (rank + 0.5)
        rows = (
            "samples\n" + " ".join(map(str, seen["samples"])),
            f"loss\n{seen['loss']:.2f}",
            f"its gradient\n{seen['own']:.4f}",
            "",
            f"the mean\n{seen['mean']:.4f}",
            f"new weight\n{seen['weight']:.4f}",
        )
        told.append(f"rank {rank}: " + ", ".join(filter(None, rows)).replace("\n", " "))
        parts.append(text(middle, 14, f"rank {rank}", "xt-label", "middle"))
        for row, words in enumerate(rows):
            y = 22 + 52 * row
            if words:
                parts += boxed(Box(words, rank if row < 3 else 7), x, y, wide - 8, 38)
            if row < 5:
                parts.append(line(middle, y + 38, middle, y + 52, "xt-axis"))
    parts += boxed(Box("all-reduce, divided by the ranks", 7), 4, 178, WIDTH - 12, 38)
    title = "One step of data parallelism"
    return document(WIDTH, 330, parts, title, "; ".join(told))
