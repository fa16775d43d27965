"""Mixed precision: 16-bit weights compute, fp32 masters remember; a scale for fp16.

Computes:   an optimizer's step on fp32 masters, skipped when a gradient has overflowed.
Sends:      one number a step, if fp16 is scaled: all ranks skip a step, or none does.
Leaves out: parameter groups, averaging gradients, checkpoints, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class MixedPrecision:
    """`init_scale` is for fp16; bf16 has the range of fp32 and needs no scale."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        init_scale: float | None = None,
        process_group: Any = None,
        **defaults: Any,
    ):
        self.params, self.group = list(params), process_group
        self.masters = [p.data.float() if p.itemsize == 2 else p for p in self.params]
        self.optimizer = optimizer_class(self.masters, **defaults)
        self.scaled, self.scale = init_scale is not None, init_scale or 1.0
        self.growth_interval, self.good_steps = 2000, 0

    def backward(self, loss: Tensor) -> None:
        (loss * self.scale).backward()  # lifts small gradients into the range of fp16

    @torch.no_grad()
    def step(self) -> bool:
        """False when an overflow, on any rank, made all of them skip the step."""
        overflows = torch.zeros((), device=self.params[0].device)
        for p, master in zip(self.params, self.masters, strict=True):
            master.grad = None if p.grad is None else p.grad.to(master) / self.scale
            if p.grad is not None:
                overflows += (~p.grad.isfinite()).any()
        if self.scaled and dist.is_initialized():
            dist.all_reduce(overflows, group=self.group)
        finite = not self.scaled or overflows.item() == 0
        if finite:
            self.optimizer.step()
        for p, master in zip(self.params, self.masters, strict=True):
            p.copy_(master)  # as it was, after an overflow
            master.grad = None  # 4 bytes a parameter, in here only
        if self.scaled:
            self._update_scale(finite)
        return finite

    def _update_scale(self, finite: bool) -> None:
        self.good_steps = self.good_steps + 1 if finite else 0
        if not finite:
            self.scale *= 0.5
        elif self.good_steps % self.growth_interval == 0:  # again and again
            self.scale *= 2.0

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None
