"""Lecture 2: our DistributedDataParallel against torch's.

A whole training step of a small Llama-like model, three times: with much to compute,
with much to send, and so small that neither takes long. All sides use torch's fused
AdamW and buckets of 25 MiB after a first one of 1 MiB, and their losses must agree.

`size` is that of all weights in bytes, and so of all gradients.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from xtrain.bench.race import Case, Contestant, Goal, Race
from xtrain.bench.training import (
    CHECKED,
    TOLERANCE,
    Shape,
    adamw,
    model_for,
    sum_of,
    training_trial,
)
from xtrain.comm.choice import RING
from xtrain.data_parallel import DistributedDataParallel
from xtrain.data_parallel.buckets import make_buckets
from xtrain.plan import Traffic, collective_traffic

TITLE = "Lecture 2: our DistributedDataParallel against torch's"
MiB = 2**20
COMPUTE, SEND, SMALL = Shape(4, 4, 256), Shape(8, 1, 64), Shape(4, 1, 64)
SIZES = {COMPUTE: 16 * MiB, SEND: 96 * MiB, SMALL: 2 * MiB}
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


def race(
    name: str,
    title: str,
    shape: Shape,
    sides: tuple[Contestant, ...],
    goals: Mapping[str, float | None],
) -> Race:
    """A race of steps of one shape."""
    size = SIZES[shape]
    return Race(
        name,
        title,
        sides,
        sizes=(size,),
        tolerance=TOLERANCE,
        checked_calls=CHECKED,
        memory=shape is SEND,
        goals=tuple(
            Goal(who, ratio, size, ranks)
            for who, ratio in goals.items()
            if ratio is not None
            for ranks in (2, 4)
        ),
    )


def ddp_race(name: str, title: str, shape: Shape, shm_goal: float) -> Race:
    """Our class against torch's."""
    goals = {"ours": 0.98, "ours on xtrain-shm": shm_goal}
    return race(name, title, shape, contestants(shape), goals)


RACES = [
    ddp_race("compute", "A step with much to compute", COMPUTE, 0.98),
    ddp_race("send", "A step with much to send", SEND, 1.15),
    ddp_race("small", "A small step", SMALL, 1.15),
]
