"""ZeRO-2: all weights on every rank, gradients and optimizer state of 1/N of them.

Computes:   the step of an element-wise optimizer, on the average of the gradients.
Sends:      (N-1)/N of the parameters in each backward, and (N-1)/N in each step.
Leaves out: buckets, overlap, groups, frozen weights, fp32 sums of 16 bits, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Zero2:
    """For 16-bit weights let `optimizer_class` keep fp32 masters (MixedPrecision)."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        process_group: Any = None,
        **defaults: Any,
    ):
        self.group, self.size = process_group, dist.get_world_size(process_group)
        self.shards: dict[Tensor, tuple[Tensor, Tensor]] = {}  # flat weights, own part
        for p in [p for p in params if p.requires_grad][::-1]:  # as backward goes
            dist.broadcast(p.detach(), group=process_group, group_src=0)
            flat = self._flatten(p.detach())
            p.data = flat[: p.numel()].view_as(p)  # the weights live in flat
            own = flat.chunk(self.size)[dist.get_rank(process_group)]
            self.shards[p] = flat, nn.Parameter(own)  # the same memory
            p.register_post_accumulate_grad_hook(self._gradient_is_ready)
        owned = [own for _, own in self.shards.values()]
        self.optimizer = optimizer_class(owned, **defaults)
        self.zero_grad = self.optimizer.zero_grad  # the parameters have no gradients
        self.queue: list[Tensor] = []  # what this backward has not reduced yet

    def _flatten(self, tensor: Tensor) -> Tensor:
        return nn.functional.pad(tensor.flatten(), (0, -tensor.numel() % self.size))

    def _gradient_is_ready(self, _: Tensor) -> None:
        if not self.queue:  # the first gradient of a backward
            self.queue = list(self.shards)
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)
        while self.queue and self.queue[0].grad is not None:
            self._reduce(self.queue.pop(0))  # in the same order on every rank

    def _finish(self) -> None:
        while self.queue:  # what got no gradient, and what had to wait for it
            self._reduce(self.queue.pop(0))

    def _reduce(self, p: Tensor) -> None:
        full = self._flatten(torch.zeros_like(p) if p.grad is None else p.grad)
        p.grad, own = None, self.shards[p][1]
        mine = torch.empty_like(own)
        _reduce_scatter(mine, full, group=self.group)
        own.grad = mine / self.size + (0 if own.grad is None else own.grad)

    def step(self) -> None:
        self.optimizer.step()
        for flat, own in self.shards.values():
            _all_gather(flat, own.detach(), group=self.group)
