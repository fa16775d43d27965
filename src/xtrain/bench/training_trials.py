"""A training step as a trial: forward, backward, optimizer, on each rank's batch.

    contestant = how a model is wrapped and with what it is stepped
    trial      = the same model, the same batches, CHECKED steps; the losses must agree

The model is an `XtrainModel`, small and with half as many key heads as query heads.

The loss of a rank in step k depends on the weights that k - 1 updates left on all
ranks, so losses that agree say that gradients were averaged and weights updated alike.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain import backends
from xtrain.bench.race import Case, Contestant, Goal, Race, Trial
from xtrain.comm.mesh import timeout_of
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.plan import Traffic

CHECKED = 4  # steps whose losses are compared
TOLERANCE = 1e-4  # of a loss near 6: sums in another order, four updates long
OPTIONS: dict[str, Any] = {"lr": 1e-3, "fused": True}  # of torch's AdamW, on every side

HEADS, KV_HEADS = 4, 2
VOCABULARY = 512
WIDTH_STEP = 32  # head sizes in steps of 8

# Takes a model and a group; returns what to call, and an optimizer or what looks so.
Wrap = Callable[[nn.Module, ProcessGroup], tuple[Callable[..., Tensor], Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """Layers of the model, and the batch that each rank trains on."""

    layers: int
    batch: int
    sequence: int
    kv_heads: int = KV_HEADS


MiB = 2**20
COMPUTE, SEND, SMALL = Shape(4, 4, 256), Shape(8, 1, 64), Shape(4, 1, 64)
"""Much to compute, much to send, and little of both."""
SIZES = {COMPUTE: 16 * MiB, SEND: 96 * MiB, SMALL: 2 * MiB}
"""Bytes of all weights, and so of all gradients."""


def group_on(backend: str) -> ProcessGroup:
    """A group of all ranks on `backend`; for gloo the default group."""
    world = dist.group.WORLD
    assert world is not None
    if backend == "gloo":
        return world
    backends.register()
    return dist.new_group(timeout=timeout_of(None), backend=backend)


def training_trial(
    shape: Shape,
    wrap: Wrap,
    backend: str,
    case: Case,
    data_rank: Callable[[], int] = dist.get_rank,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
    update: bool = True,
) -> Trial:
    """One step of the model whose weights take about `case.size` bytes.

    Args:
        data_rank: which batch this rank trains on; where several ranks hold parts of
            one model, they give the same number.
        around: a context that forward and backward run in.
        update: False leaves out the optimizer's step, but in the checked steps.
    """
    config = config_for(case.size, shape.layers, shape.kv_heads)
    model = XtrainModel(config, device=case.device)
    tokens, labels = batch_of(shape, data_rank()).to(case.device)
    wrapped, optimizer = wrap(model, group_on(backend))
    losses = torch.zeros(CHECKED, device=case.device)
    steps = iter(range(CHECKED))

    def step() -> None:
        optimizer.zero_grad()
        with around():
            loss = wrapped(tokens, labels)
            loss.backward()
        if isinstance(wrapped, XtrainModel) and wrapped.tensor is not None:
            wrapped.sync_gradients()  # what its tensor ranks have parts of
        place = next(steps, None)
        if update or place is not None:
            optimizer.step()
        if place is not None:
            losses[place] = loss.detach()

    return Trial(step, [losses])


def batch_of(shape: Shape, data_rank: int) -> Tensor:
    """Tokens and labels, [2, batch, sequence]."""
    generator = torch.Generator().manual_seed(1 + data_rank)
    size = (2, shape.batch, shape.sequence)
    return torch.randint(VOCABULARY, size, generator=generator)


def model_for(case: Case, shape: Shape) -> XtrainModel:
    """The model of a case without memory behind it, to count its parameters."""
    config = config_for(case.size, shape.layers, shape.kv_heads)
    return XtrainModel(config, device="meta")


def config_for(nbytes: int, layers: int, kv_heads: int = KV_HEADS) -> XtrainConfig:
    """The widest model whose float32 weights take at most `nbytes` (one at least)."""
    width = WIDTH_STEP
    while 4 * config_of(width + WIDTH_STEP, layers, kv_heads).parameters <= nbytes:
        width += WIDTH_STEP
    return config_of(width, layers, kv_heads)


def config_of(width: int, layers: int, kv_heads: int = KV_HEADS) -> XtrainConfig:
    """A model of this width; SwiGLU is about 8/3 as wide."""
    return XtrainConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=-(-8 * width // 3 // WIDTH_STEP) * WIDTH_STEP,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=kv_heads,
    )


def sum_of(parts: Iterable[Traffic]) -> Traffic:
    """Several collectives, one after the other."""
    return reduce(Traffic.then, parts)


def adamw(model: nn.Module) -> Optimizer:
    """torch's fused AdamW over all parameters."""
    return torch.optim.AdamW(model.parameters(), **OPTIONS)


def step_race(
    name: str,
    title: str,
    shape: Shape,
    sides: tuple[Contestant, ...],
    goals: Mapping[str, float | None],
) -> Race:
    """A race of training steps of one shape."""
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
