"""Lecture 2: our DistributedDataParallel against torch's.

The three training steps of `xtrain.bench.training_trials`, of a small Llama-like model.
All sides use torch's fused AdamW and buckets of 25 MiB after a first one of 1 MiB, and
their losses must agree.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from xtrain.bench.race import Case, Contestant, Race
from xtrain.bench.training_trials import (
    COMPUTE,
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
from xtrain.comm.collective_choice import RING
from xtrain.data_parallel import DistributedDataParallel
from xtrain.data_parallel.buckets import make_buckets
from xtrain.plan import Traffic, collective_traffic

TITLE = "Lecture 2: our DistributedDataParallel against torch's"
BUCKET_MB = 25


def torch_ddp(
    model: nn.Module, group: ProcessGroup, **options: Any
) -> tuple[Callable[..., Tensor], object]:
    """torch's DDP, as its users write it."""
    return TorchDDP(model, process_group=group, **options), adamw(model)


def our_ddp(
    model: nn.Module, group: ProcessGroup, **options: Any
) -> tuple[Callable[..., Tensor], object]:
    """Ours in its place."""
    return DistributedDataParallel(model, group, **options), adamw(model)


def ring_ddp(
    model: nn.Module, group: ProcessGroup
) -> tuple[Callable[..., Tensor], object]:
    """Ours on the ring of lecture 1."""
    return our_ddp(model, group, collectives=RING)


def ring_traffic(shape: Shape, case: Case) -> Traffic:
    """A ring all-reduce of each bucket."""
    parameters = list(model_for(case, shape).parameters())
    buckets = make_buckets(parameters, BUCKET_MB * MiB)
    return sum_of(
        collective_traffic("ring_all_reduce", bucket.flat.numel(), case.ranks).bytes(4)
        for bucket in buckets
    )


def contestants(shape: Shape) -> tuple[Contestant, ...]:
    """torch's class and ours, on gloo and on shared memory."""
    viewing = partial(torch_ddp, gradient_as_bucket_view=True)
    on = partial(partial, training_trial, shape)
    sides = [
        Contestant("torch DDP", on(torch_ddp, "gloo")),
        Contestant("torch DDP, gradients as views", on(viewing, "gloo")),
        Contestant("ours", on(our_ddp, "gloo")),
        Contestant("torch DDP on xtrain-shm", on(torch_ddp, "xtrain-shm")),
        Contestant("ours on xtrain-shm", on(our_ddp, "xtrain-shm")),
    ]
    if shape is SEND:
        formula = partial(ring_traffic, shape)
        sides.insert(3, Contestant("ours, our ring", on(ring_ddp, "gloo"), formula))
    return tuple(sides)


def ddp_race(name: str, title: str, shape: Shape, shm_goal: float) -> Race:
    """Our class against torch's."""
    goals = {"ours": 0.98, "ours on xtrain-shm": shm_goal}
    return step_race(name, title, shape, contestants(shape), goals)


RACES = [
    ddp_race("compute", "A step with much to compute", COMPUTE, 0.98),
    ddp_race("send", "A step with much to send", SEND, 1.15),
    ddp_race("small", "A small step", SMALL, 1.15),
]
