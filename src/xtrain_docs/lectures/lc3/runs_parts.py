"""Which elements of a model a rank holds, for the picture of shards."""

import torch
from torch import Tensor, nn

from .runs_training import LAYERS, Tower, Training


def parts_held(stage: str) -> dict[str, list[list[int]]]:
    """Which elements of the model a rank holds, as ranges, when backward has ended.

    Element i of the tower begins with a value that tells i, so a tensor's first values
    tell where it lies. Two layers make a bucket.
    """
    tower = Tower()
    parameters = list(tower.parameters())
    total = sum(p.numel() for p in parameters)
    scale = 2.0**-24
    at = 0
    for parameter in parameters:
        parameter.data = (torch_range(at, parameter) * scale).view_as(parameter)
        at += parameter.numel()
    cap = 2 * total * 4 / LAYERS / 1024
    training = Training(stage, tower=tower, cap_kib=cap)
    places = {}
    for tensor in (*training.model.parameters(), *optimized(training)):
        flat = tensor.detach().flatten()
        if flat.numel():
            start = round(flat[0].item() / scale)
            assert (flat == torch_range(start, flat) * scale).all()
            places[tensor] = [start, start + flat.numel()]
    training.step()
    training.backward()
    model = list(training.model.parameters())
    graded = [p for p in {*model, *optimized(training)} if p.grad is not None]
    return {
        "weights": joined([places[p] for p in model if p in places]),
        "gradients": joined([places[p] for p in graded if p in places]),
        "optimizer state": joined(
            [places[p] for p in training.inner.state if p in places]
        ),
    }


def torch_range(start: int, like: Tensor) -> Tensor:
    """start, start + 1, ... as many as `like` has elements, in float32."""
    return torch.arange(start, start + like.numel()).float()


def optimized(training: Training) -> list[nn.Parameter]:
    """What the inner optimizer steps."""
    return [p for group in training.inner.param_groups for p in group["params"]]


def joined(ranges: list[list[int]]) -> list[list[int]]:
    """The same elements in as few ranges as possible, in order."""
    result: list[list[int]] = []
    for start, stop in sorted(ranges):
        if result and start == result[-1][1]:
            result[-1][1] = stop
        else:
            result.append([start, stop])
    return result
