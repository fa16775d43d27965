"""Small runs of lc3 whose numbers are drawn one by one."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.zero import (
    Adam,
    FullyShardedDataParallel,
    MixedPrecisionOptimizer,
    clip_sharded_grad_norm_,
)

SHAPES = {"a": (5,), "b": (3,), "c": (2, 3)}


class Three(nn.Module):
    """Three parameters; element i of all of them together is i + 1."""

    def __init__(self) -> None:
        super().__init__()
        start = 1
        for name, shape in SHAPES.items():
            values = torch.arange(start, start + torch.Size(shape).numel()).float()
            self.register_parameter(name, nn.Parameter(values.view(shape)))
            start += values.numel()


def flat_shards() -> dict[str, Any]:
    """The numbers in this rank's shard of three parameters, and its piece of each."""
    model = FullyShardedDataParallel(Three(), blocks=[])
    (group,) = model.units[0].flat_groups
    pieces = {name: piece.tolist() for name, piece in model.named_parameters()}
    return {"shard": group.shard.tolist(), "pieces": pieces}


def clipped_shards(gradient: list[float], max_norm: float) -> dict[str, Any]:
    """How a rank clips its part of a gradient: what it sums up, what comes back."""
    shard = torch.tensor(gradient).chunk(dist.get_world_size())[dist.get_rank()].clone()
    result: dict[str, Any] = {"before": shard.tolist()}
    all_reduce = dist.all_reduce

    def spied(numbers: Tensor, *args: Any, **kwargs: Any) -> Any:
        result["own"] = numbers[0].item()
        work = all_reduce(numbers, *args, **kwargs)
        result["summed"] = numbers[0].item()
        return work

    dist.all_reduce = spied
    try:
        result["norm"] = clip_sharded_grad_norm_([shard], max_norm).item()
    finally:
        dist.all_reduce = all_reduce
    return {**result, "after": shard.tolist()}


def adam_steps(gradients: list[float], lr: float) -> list[list[float]]:
    """Adam on one weight: [m, root of v, step / lr] after each gradient."""
    weight = nn.Parameter(torch.zeros(1, dtype=torch.float64))
    optimizer = Adam([weight], lr=lr)
    rows = []
    for gradient in gradients:
        before = weight.item()
        weight.grad = torch.full_like(weight, gradient)
        optimizer.step()
        state = optimizer.state[weight]
        mean, square = state["exp_avg"].item(), state["exp_avg_sq"].item()
        rows.append([mean, square**0.5, (before - weight.item()) / lr])
    return rows


def small_steps(steps: int, lr: float) -> dict[str, list[float]]:
    """A bfloat16 weight of 1 that takes small steps down: alone, and with a master."""
    found: dict[str, list[float]] = {"alone": [], "with a master": [], "master": []}
    alone, mixed = (nn.Parameter(torch.ones(1).bfloat16()) for _ in range(2))
    plain = torch.optim.SGD([alone], lr=lr)
    masters = MixedPrecisionOptimizer([mixed], torch.optim.SGD, lr=lr)
    ((_, master),) = masters.pairs
    for _ in range(steps):
        alone.grad, mixed.grad = torch.ones_like(alone), torch.ones_like(mixed)
        plain.step()
        masters.step()
        for name, weight in zip(found, (alone, mixed, master), strict=True):
            found[name].append(weight.item())
    return found


def folder_of_checkpoint() -> list[list[Any]]:
    """The files of a saved step of stage 3: [path, bytes], the folder being `run`."""
    import shutil
    import tempfile
    from pathlib import Path

    from .runs_training import Training

    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    training = Training("3")
    training.step()
    training.model.save_sharded(folder[0], 20, training.optimizer)
    dist.barrier()
    root = Path(folder[0])
    files = [
        [f"run/{file.relative_to(root).as_posix()}", file.stat().st_size]
        for file in sorted(root.rglob("*"))
        if file.is_file()
    ]
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(root)
    return files
