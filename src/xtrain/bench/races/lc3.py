"""Lecture 3: our ZeRO stages against torch's FSDP2 and ZeroRedundancyOptimizer.

The same training steps as in lecture 2. All sides use torch's fused AdamW, and their
losses must agree. Both FSDPs gather and free one layer at a time, with the rest of the
model as one more unit. `size` is that of all weights in bytes.

On gloo ours runs with its default, messages from every rank to every other
(`xtrain.comm.direct`), and with torch's collectives.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP
from torch.optim import AdamW

from xtrain.bench.race import Case, Contestant, Race
from xtrain.bench.training_trials import (
    COMPUTE,
    OPTIONS,
    SEND,
    SMALL,
    MiB,
    Shape,
    adamw,
    model_for,
    step_race,
    sum_of,
    training_trial,
)
from xtrain.comm.collective_choice import DIRECT, TORCH
from xtrain.model import XtrainModel
from xtrain.plan import Traffic, collective_traffic
from xtrain.zero import FullyShardedDataParallel, ZeroOptimizer
from xtrain.zero.buckets import BUCKET_CAP_MB, split_parameters

TITLE = "Lecture 3: our ZeRO stages against torch's FSDP2 and ZeroRedundancyOptimizer"

Wrapped = tuple[Callable[..., Tensor], Any]


def torch_fsdp(model: XtrainModel, group: ProcessGroup) -> Wrapped:
    """torch's FSDP2, as its users write it."""
    device = str(next(model.parameters()).device.type)
    mesh = DeviceMesh.from_group(group, device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, adamw(model)


def our_fsdp(model: nn.Module, group: ProcessGroup, **options: Any) -> Wrapped:
    """Stage 3; every layer is a block, as in torch's."""
    wrapped = FullyShardedDataParallel(model, group, **options)
    return wrapped, adamw(wrapped)


def our_fsdp_with_torchs(model: nn.Module, group: ProcessGroup) -> Wrapped:
    """Stage 3 with the collectives that FSDP2 calls."""
    return our_fsdp(model, group, collectives=TORCH)


def torch_zero1(model: nn.Module, group: ProcessGroup, **options: Any) -> Wrapped:
    """torch's DDP with its ZeroRedundancyOptimizer, as its users write it."""
    ddp = TorchDDP(model, process_group=group)
    optimizer = ZeroRedundancyOptimizer(
        ddp.parameters(), AdamW, process_group=group, **options, **OPTIONS
    )
    return ddp, optimizer


def our_zero(model: nn.Module, group: ProcessGroup, **options: Any) -> Wrapped:
    """Stage 1 or 2: the bare module, and our optimizer."""
    optimizer = ZeroOptimizer(
        model.parameters(), AdamW, process_group=group, **options, **OPTIONS
    )
    return model, optimizer


def our_zero_with_torchs(model: nn.Module, group: ProcessGroup) -> Wrapped:
    """Stage 1 with torch's collectives."""
    return our_zero(model, group, collectives=TORCH)


def shard_traffic(numel: int, ranks: int) -> Traffic:
    """One reduce-scatter, or one all-gather, of a padded flat tensor."""
    padded = -(-numel // ranks) * ranks
    return collective_traffic("ring_reduce_scatter", padded, ranks).bytes(4)


def zero_traffic(shape: Shape, case: Case) -> Traffic:
    """Stages 1 and 2: each bucket reduce-scattered and all-gathered."""
    parameters = list(model_for(case, shape).parameters())
    buckets = split_parameters(parameters, int(BUCKET_CAP_MB * MiB))
    numels = [sum(p.numel() for p in members) for members in buckets]
    return sum_of(shard_traffic(n, case.ranks) for n in numels for _ in range(2))


def fsdp_traffic(shape: Shape, case: Case) -> Traffic:
    """Stage 3: each layer gathered twice, the root once, and each reduce-scattered."""
    model = model_for(case, shape)
    layers = [sum(p.numel() for p in layer.parameters()) for layer in model.layers]
    root = sum(p.numel() for p in model.parameters()) - sum(layers)
    passes = [n for n in layers for _ in range(3)] + [root, root]
    return sum_of(shard_traffic(n, case.ranks) for n in passes)


def fsdp_race(
    name: str, title: str, shape: Shape, gloo: float, shm: float | None
) -> Race:
    """Stage 3 against FSDP2; the least ratios asked of two contestants."""
    on = partial(partial, training_trial, shape)
    ours = partial(our_fsdp, collectives=DIRECT)
    sides = (
        Contestant("torch FSDP2", on(torch_fsdp, "gloo")),
        Contestant("ours, torch's collectives", on(our_fsdp_with_torchs, "gloo")),
        Contestant("ours", on(ours, "gloo"), partial(fsdp_traffic, shape)),
        Contestant("torch FSDP2 on xtrain-shm", on(torch_fsdp, "xtrain-shm")),
        Contestant("ours on xtrain-shm", on(our_fsdp, "xtrain-shm")),
    )
    goals = {"ours": gloo, "ours on xtrain-shm": shm}
    return step_race(name, title, shape, sides, goals)


def zero_race(name: str, title: str, shape: Shape) -> Race:
    """Stages 1 and 2 against ZeroRedundancyOptimizer, none slower."""
    on = partial(partial, training_trial, shape)
    viewing = partial(torch_zero1, parameters_as_bucket_view=True)
    formula = partial(zero_traffic, shape)
    stage1 = partial(our_zero, collectives=DIRECT)
    stage2 = partial(our_zero, stage=2, collectives=DIRECT)
    sides = (
        Contestant("torch ZRO", on(torch_zero1, "gloo")),
        Contestant("torch ZRO, parameters as views", on(viewing, "gloo")),
        Contestant("stage 1, torch's collectives", on(our_zero_with_torchs, "gloo")),
        Contestant("stage 1", on(stage1, "gloo"), formula),
        Contestant("stage 2", on(stage2, "gloo"), formula),
        Contestant("stage 1 on xtrain-shm", on(our_zero, "xtrain-shm")),
    )
    goals = {"stage 1": 1.0, "stage 1 on xtrain-shm": 1.0}
    return step_race(name, title, shape, sides, goals)


RACES = [
    fsdp_race("fsdp_compute", "Stage 3, much to compute", COMPUTE, 1.15, None),
    fsdp_race("fsdp_send", "Stage 3, much to send", SEND, 1.15, 2.0),
    fsdp_race("fsdp_small", "Stage 3, a small step", SMALL, 1.15, 2.0),
    zero_race("zero1_compute", "Stages 1 and 2, much to compute", COMPUTE),
    zero_race("zero1_send", "Stages 1 and 2, much to send", SEND),
    zero_race("zero1_small", "Stages 1 and 2, a small step", SMALL),
]
