"""The wrappers of the support matrix, behind one set of names.

A wrapper without one of them raises what a user would see.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.data_parallel import DistributedDataParallel, NaiveDataParallel
from xtrain.zero import (
    FullyShardedDataParallel,
    LossScaler,
    MixedPrecisionOptimizer,
    ZeroOptimizer,
    clip_sharded_grad_norm_,
)

from .cut import CutToy
from .setup import Setup
from .toy import Toy


@dataclass
class Wrapped:
    """A wrapped module with the calls that a training loop makes.

    Attributes:
        model: called with tokens.
        reduction: has `no_sync()` and `reduce_gradients()`.
        clip: takes the largest norm.
        gradients: what this rank steps, a part of them if `sharded`.
        weights: whole tensors by name.
        naive: somebody has to call `reduce_gradients()`.
    """

    model: Any
    optimizer: Any
    reduction: Any
    clip: Callable[[float], Any]
    gradients: Callable[[], list[Tensor]]
    weights: Callable[[], dict[str, Tensor]]
    sharded: bool = True
    naive: bool = False


def replicated(
    kind: type[nn.Module], module: nn.Module, setup: Setup,
    group: ProcessGroup | None, scaler: LossScaler | None,
) -> Wrapped:  # fmt: skip
    """NaiveDataParallel and DistributedDataParallel, with an optimizer of its own."""
    module = module.to(setup.low or setup.dtype)
    model = kind(module, process_group=group, **setup.options)
    trained = [p for p in module.parameters() if p.requires_grad]
    if setup.low is None:
        optimizer: Any = setup.optimizer(trained)
    else:
        optimizer = MixedPrecisionOptimizer(
            trained, setup.optimizer_class, scaler, **setup.defaults
        )

    def clip(max_norm: float) -> None:
        if not isinstance(module, CutToy):
            nn.utils.clip_grad_norm_(trained, max_norm)
            return
        held = [
            (p.grad, module.placement(name).is_first)
            for name, p in module.named_parameters()
            if p.grad is not None
        ]
        gradients, counts = map(list, zip(*held, strict=True))
        clip_sharded_grad_norm_(gradients, max_norm, module.tensor, counts)

    return Wrapped(
        model, optimizer, model, clip, lambda: gradients_of(trained),
        module.state_dict, sharded=False, naive=kind is NaiveDataParallel,
    )  # fmt: skip


def sharded(
    stage: int, module: nn.Module, setup: Setup, group: ProcessGroup | None
) -> Wrapped:
    """ZeroOptimizer: the module stays bare, the optimizer does the rest."""
    model = module.to(setup.low or setup.dtype)
    zero: Any = ZeroOptimizer(
        model.parameters(), setup.optimizer_class, stage=stage, process_group=group,
        **setup.options, **setup.defaults,
    )  # fmt: skip
    cut = model if isinstance(model, CutToy) else None
    return Wrapped(
        model, zero, zero, lambda max_norm: zero.clip_grad_norm_(max_norm, cut),
        lambda: zero.gradients, model.state_dict,
    )  # fmt: skip


def fully_sharded(
    reshard: bool, module: nn.Module, setup: Setup, group: ProcessGroup | None
) -> Wrapped:
    """FullyShardedDataParallel, with an optimizer over its shards."""

    def wrap(inner: nn.Module) -> FullyShardedDataParallel:
        return FullyShardedDataParallel(
            inner.to(setup.dtype), process_group=group, compute_dtype=setup.low,
            reshard_after_forward=reshard, **setup.options,
        )  # fmt: skip

    if setup.meta:
        with torch.device("meta"):
            empty = Toy(**setup.model)
        if isinstance(module, CutToy):
            empty = module.same_cut(empty)
        model = wrap(empty)
        model.load_state_dict(wrap(module).state_dict())
    else:
        model = wrap(module)
    optimizer = setup.optimizer(p for p in model.parameters() if p.requires_grad)
    return Wrapped(
        model, optimizer, model, model.clip_grad_norm_,
        lambda: gradients_of(model.parameters()), model.full_state_dict,
    )  # fmt: skip


def gradients_of(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    return [p.grad for p in parameters if p.grad is not None]


def wrap(
    module: nn.Module,
    setup: Setup,
    group: ProcessGroup | None,
    scaler: LossScaler | None,
) -> Wrapped:
    """The wrapper that the setup names, around a module."""
    if setup.inner:
        module = wrap_inside(module, setup, group)
    if setup.meta and not setup.wrapper.startswith("fsdp"):
        module = module.to("meta")
    match setup.wrapper:
        case "naive":
            return replicated(NaiveDataParallel, module, setup, group, scaler)
        case "ddp":
            return replicated(DistributedDataParallel, module, setup, group, scaler)
        case "zero1" | "zero2":
            return sharded(int(setup.wrapper[-1]), module, setup, group)
        case "fsdp" | "fsdp_kept":
            return fully_sharded(setup.wrapper == "fsdp", module, setup, group)
    raise ValueError(f"no wrapper {setup.wrapper!r}")


def wrap_inside(
    module: nn.Module, setup: Setup, group: ProcessGroup | None
) -> nn.Module:
    """A module that has the setup's inner wrapper, with no options."""
    if setup.inner == "torch":
        return nn.parallel.DistributedDataParallel(module, process_group=group)
    inner = replace(setup, wrapper=setup.inner, inner="", options={})
    return wrap(module, inner, group, None).model
