"""Backward on two ranks, of which the second one skips a layer."""

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.comm.collective_choice import TORCH
from xtrain.data_parallel import DistributedDataParallel

from ... import runs
from ...figures import REGISTRY
from .boxes import Box, lanes


class Skipping(nn.Sequential):
    """A forward without the layers whose numbers are given."""

    def forward(  # type: ignore[override]
        self, x: torch.Tensor, skipped: list[int]
    ) -> torch.Tensor:
        for number, layer in enumerate(self):
            x = x if number in skipped else layer(x)
        return x


def a_layer_is_skipped(skipped: int) -> list[str]:
    """What happens in a backward, in order, when the last rank skips a layer."""
    seen: list[str] = []

    def all_reduce(flat: torch.Tensor, group: Any = None) -> Any:
        seen.append("sent")
        return TORCH.all_reduce(flat, group=group)

    net = Skipping(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    for number, weight in enumerate(net.parameters()):
        weight.register_post_accumulate_grad_hook(
            lambda _, number=number: seen.append(f"gradient {number}")
        )
    spied, two_layers = replace(TORCH, all_reduce=all_reduce), 2 * 16 * 4 / 2**20
    model = DistributedDataParallel(net, bucket_cap_mb=two_layers, collectives=spied)
    last = dist.get_rank() == dist.get_world_size() - 1
    loss = model(torch.ones(1, 4), [skipped] if last else []).sum()
    try:
        loss.backward()
    except RuntimeError:
        seen.append("error")
    return seen


@REGISTRY
def a_bucket_waits(skipped: int = 1) -> str:
    """A box an event; the gradient that never came is an empty one."""
    found = runs.remembered(a_layer_is_skipped, 2, skipped)
    rows = [(f"rank {rank}", waiting_boxes(seen)) for rank, seen in enumerate(found)]
    return lanes(rows, "Backward of two ranks; the second one skips a layer")


def waiting_boxes(seen: list[str]) -> list[Box]:
    """The events of one rank."""
    boxes, bucket = [], 0
    missing = set("0123") - {event[-1] for event in seen if event[0] == "g"}
    for event in seen:
        if event.startswith("gradient"):
            boxes.append(Box(f"grad\n{event[-1]}", 0, f"{event} is complete"))
        elif event == "error":
            boxes.append(Box("raise", 1, "RuntimeError"))
        else:
            if bucket == 1 and missing:
                number = missing.pop()
                hover = f"gradient {number} never comes: zeros at the end of backward"
                boxes.append(Box(f"zeros\n{number}", None, hover))
            boxes.append(Box(f"send\nb{bucket}", 2, f"bucket {bucket} leaves"))
            bucket += 1
    return boxes
