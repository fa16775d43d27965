"""The wrappers of the support matrix, behind one set of names.

Each takes a bare module and a Setup and has `model` (called with tokens), `optimizer`,
`no_sync()`, `reduce_gradients()`, `clip(max_norm)`, `gradients()` (what this rank
steps), `weights()` (whole tensors by name). A wrapper without one of them raises what a
user would see.
"""

from contextlib import AbstractContextManager
from dataclasses import replace
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


class Replicated:
    """NaiveDataParallel and DistributedDataParallel, with an optimizer of its own."""

    def __init__(
        self,
        wrap: type[nn.Module],
        module: nn.Module,
        setup: Setup,
        group: ProcessGroup | None,
        scaler: LossScaler | None,
    ):
        self.model = wrap(
            module.to(setup.low or setup.dtype), process_group=group, **setup.options
        )
        self.bare, self.naive = module, wrap is NaiveDataParallel
        self.trained = [p for p in module.parameters() if p.requires_grad]
        self.optimizer: Any
        if setup.low is None:
            self.optimizer = setup.optimizer(self.trained)
        else:
            self.optimizer = MixedPrecisionOptimizer(
                self.trained, setup.optimizer_class, scaler, **setup.defaults
            )

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()  # type: ignore[operator]

    def reduce_gradients(self) -> None:
        self.model.reduce_gradients()  # type: ignore[operator]

    def clip(self, max_norm: float) -> None:
        if not isinstance(self.bare, CutToy):
            nn.utils.clip_grad_norm_(self.trained, max_norm)
            return
        held = [
            (p.grad, self.bare.placement(name).is_first)
            for name, p in self.bare.named_parameters()
            if p.grad is not None
        ]
        gradients, counts = map(list, zip(*held, strict=True))
        clip_sharded_grad_norm_(gradients, max_norm, self.bare.tensor, counts)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.trained if p.grad is not None]

    def weights(self) -> dict[str, Tensor]:
        return self.bare.state_dict()


class Sharded:
    """ZeroOptimizer: the module stays bare, the optimizer does the rest."""

    naive = False

    def __init__(
        self, stage: int, module: nn.Module, setup: Setup, group: ProcessGroup | None
    ):
        self.model = module.to(setup.low or setup.dtype)
        self.optimizer = ZeroOptimizer(
            self.model.parameters(),
            setup.optimizer_class,
            stage=stage,
            process_group=group,
            **setup.options,
            **setup.defaults,
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return self.optimizer.no_sync()  # type: ignore[attr-defined, no-any-return]

    def reduce_gradients(self) -> None:
        self.optimizer.reduce_gradients()

    def clip(self, max_norm: float) -> None:
        module = self.model if isinstance(self.model, CutToy) else None
        self.optimizer.clip_grad_norm_(max_norm, module)

    def gradients(self) -> list[Tensor]:
        return self.optimizer.gradients

    def weights(self) -> dict[str, Tensor]:
        return self.model.state_dict()


class FullySharded:
    """FullyShardedDataParallel, with an optimizer over its shards."""

    naive = False

    def __init__(
        self, reshard: bool, module: nn.Module, setup: Setup, group: ProcessGroup | None
    ):
        def wrap(inner: nn.Module) -> FullyShardedDataParallel:
            return FullyShardedDataParallel(
                inner.to(setup.dtype),
                process_group=group,
                compute_dtype=setup.low,
                reshard_after_forward=reshard,
                **setup.options,
            )

        if setup.meta:
            with torch.device("meta"):
                empty = Toy(**setup.model)
            if isinstance(module, CutToy):
                empty = module.same_cut(empty)
            self.model = wrap(empty)
            self.model.load_state_dict(wrap(module).state_dict())
        else:
            self.model = wrap(module)
        self.optimizer = setup.optimizer(
            p for p in self.model.parameters() if p.requires_grad
        )

    def no_sync(self) -> AbstractContextManager[None]:
        return self.model.no_sync()  # type: ignore[operator]

    def reduce_gradients(self) -> None:
        self.model.reduce_gradients()  # type: ignore[operator]

    def clip(self, max_norm: float) -> None:
        self.model.clip_grad_norm_(max_norm)

    def gradients(self) -> list[Tensor]:
        return [p.grad for p in self.model.parameters() if p.grad is not None]

    def weights(self) -> dict[str, Tensor]:
        return self.model.full_state_dict()


Wrapped = Replicated | Sharded | FullySharded


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
            return Replicated(NaiveDataParallel, module, setup, group, scaler)
        case "ddp":
            return Replicated(DistributedDataParallel, module, setup, group, scaler)
        case "zero1" | "zero2":
            return Sharded(int(setup.wrapper[-1]), module, setup, group)
        case "fsdp" | "fsdp_kept":
            return FullySharded(setup.wrapper == "fsdp", module, setup, group)
    raise ValueError(f"no wrapper {setup.wrapper!r}")


def wrap_inside(
    module: nn.Module, setup: Setup, group: ProcessGroup | None
) -> nn.Module:
    """A module that has the setup's inner wrapper, with no options."""
    if setup.inner == "torch":
        return nn.parallel.DistributedDataParallel(module, process_group=group)
    inner = replace(setup, wrapper=setup.inner, inner="", options={})
    return wrap(module, inner, group, None).model


def is_sharded(wrapped: Wrapped) -> bool:
    """Whether a rank steps a part of the gradients only."""
    return not isinstance(wrapped, Replicated)


__all__ = ["Wrapped", "is_sharded", "torch", "wrap"]
