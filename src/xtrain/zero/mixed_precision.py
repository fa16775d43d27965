"""Mixed precision: compute in 16 bits, keep masters in 32.

    fp32 masters --cast--> 16-bit weights -> forward, backward -> 16-bit gradients
        ^                                                               |
        +--- fp32 optimizer step <---- fp32 gradients <----unscale------+

A bf16 weight has 7 bits behind its leading one: an update below 1/512 to 1/256 of it
rounds away, step after step. The fp32 master accumulates such updates.

fp16 has a second problem, its narrow range: small gradients become zero. The loss is
multiplied by a large number, and the gradients are divided by it again in fp32. When
something overflows, the step is skipped and the scale halved, on every rank or on none.
bf16 has the range of fp32 and needs no scale.

Micikevicius et al., Mixed Precision Training, 2018.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.checks import message_device
from xtrain.comm.main_grad import read_in_fp32
from xtrain.comm.uneven import has_uneven_calls


class LossScaler:
    """The dynamic scale of an fp16 loss.

    Args:
        init_scale: the first scale.
        growth_factor, growth_interval: after this many good steps in a row the scale is
            multiplied by the factor.
        backoff_factor: what an overflow multiplies the scale by.
        process_group: the ranks that decide together; None for all.
    """

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        process_group: ProcessGroup | None = None,
    ):
        scales = 0 < init_scale < math.inf and 1 < growth_factor < math.inf
        if not scales or not 0 < backoff_factor < 1 or growth_interval < 1:
            raise ValueError(
                f"init_scale={init_scale} must be positive, growth_factor="
                f"{growth_factor} above 1, both finite, backoff_factor="
                f"{backoff_factor} in (0, 1), growth_interval={growth_interval} not "
                "below 1"
            )
        self.scale = init_scale
        self.growth_factor, self.growth_interval = growth_factor, growth_interval
        self.backoff_factor = backoff_factor
        self.process_group = process_group
        self.good_steps = 0

    def scale_loss(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    def unscale(self, gradients: Iterable[Tensor]) -> bool:
        """Divide fp32 gradients by the scale, in place; True when all are finite.

        All ranks of the group get the same answer: one that skips a step alone would
        have other weights from then on. Inside DDP's join() each rank decides alone,
        as ranks without inputs would not reply: gradients are the same on the others.
        """
        finite = True
        for gradient in gradients:
            gradient.div_(self.scale)
            finite = finite and bool(torch.isfinite(gradient).all())
        if dist.is_initialized() and not has_uneven_calls(self.process_group):
            device = message_device(self.process_group)
            bad = torch.tensor(0.0 if finite else 1.0, device=device)
            dist.all_reduce(bad, op=dist.ReduceOp.MAX, group=self.process_group)
            finite = bad.item() == 0
        return finite

    def update(self, finite: bool) -> None:
        """Halve after an overflow, double after enough good steps."""
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale *= self.backoff_factor
        elif self.good_steps == self.growth_interval:
            self.scale *= self.growth_factor
            self.good_steps = 0

    def state_dict(self) -> dict[str, float]:
        return {"scale": self.scale, "good_steps": self.good_steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        self.scale, self.good_steps = state["scale"], int(state["good_steps"])


class MixedPrecisionOptimizer:
    """Step fp32 master copies of 16-bit parameters.

    Args:
        params: the model's parameters, fp16 or bf16, or groups of them; fp32 ones are
            stepped as they are.
        optimizer_class: built over the masters, with `defaults`.
        scaler: for fp16; call `backward(loss)` instead of `loss.backward()`.
    """

    def __init__(
        self,
        params: Any,
        optimizer_class: type[Optimizer],
        scaler: LossScaler | None = None,
        **defaults: Any,
    ):
        groups = list(params)
        if not groups or not isinstance(groups[0], dict):
            groups = [{"params": groups}]
        self.scaler = scaler
        self.pairs: list[tuple[nn.Parameter, nn.Parameter]] = []  # (model's, master)
        master_groups = []
        for group in groups:
            masters = []
            for parameter in list(group["params"]):
                master = parameter
                if parameter.dtype in (torch.float16, torch.bfloat16):
                    master = nn.Parameter(parameter.detach().float())
                self.pairs.append((parameter, master))
                masters.append(master)
            master_groups.append({**group, "params": masters})
        read_in_fp32(p for p, master in self.pairs if master is not p)
        self.optimizer = optimizer_class(master_groups, **defaults)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def backward(self, loss: Tensor) -> None:
        (self.scaler.scale_loss(loss) if self.scaler else loss).backward()

    @torch.no_grad()
    def step(self) -> bool:
        """Update the masters, then the model; False when an overflow skipped it.

        Gradients of several backwards are in fp32 already. Those of one have 16 bits:
        their copies live in here only, 4 bytes per parameter for a moment.
        """
        copies = [(p, master) for p, master in self.pairs if master is not p]
        for parameter, master in copies:
            grad = parameter.grad
            # unscale writes to it
            copy = self.scaler is not None
            master.grad = grad if grad is None else grad.to(master.dtype, copy=copy)
        finite = True
        if self.scaler is not None:
            gradients = [m.grad for _, m in self.pairs if m.grad is not None]
            finite = self.scaler.unscale(gradients)
            self.scaler.update(finite)
        if finite:
            self.optimizer.step()
        for parameter, master in copies:
            master.grad = None
            if finite:
                parameter.copy_(master)
        return finite

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients. Multiplying them by zero would keep a NaN."""
        for parameter, master in self.pairs:
            parameter.grad = None
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        masters = [master.detach() for _, master in self.pairs]
        scaler = self.scaler.state_dict() if self.scaler else None
        inner = self.optimizer.state_dict()
        return {"masters": masters, "scaler": scaler, "optimizer": inner}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        for (parameter, master), saved in zip(
            self.pairs, state["masters"], strict=True
        ):
            master.copy_(saved)
            parameter.copy_(master)
