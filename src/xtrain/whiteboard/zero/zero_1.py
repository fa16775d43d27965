"""ZeRO-1: all weights on every rank, the optimizer state of 1/N of them.

Computes:   the step of an element-wise optimizer, on the average of the gradients.
Sends:      2(N-1)/N of the parameters a step: what an all-reduce sends, in two halves.
Leaves out: overlap, parameter groups, frozen weights, fp32 sums of 16 bits, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

# torch 2.13 has new names for these.
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)


class Zero1:
    """For 16-bit weights let `optimizer_class` keep fp32 masters (MixedPrecision)."""

    def __init__(
        self,
        params: Any,
        optimizer_class: Any,
        process_group: Any = None,
        **defaults: Any,
    ):
        self.params, self.group = [p for p in params if p.requires_grad], process_group
        self.size = dist.get_world_size(process_group)
        self.flat = self._flatten([p.detach() for p in self.params])
        dist.broadcast(self.flat, group=process_group, group_src=0)  # begin as rank 0
        # From here on the parameters are views of the flat tensor.
        nn.utils.vector_to_parameters(self.flat, self.params)
        self.shard = nn.Parameter(self.flat.chunk(self.size)[dist.get_rank(self.group)])
        self.optimizer = optimizer_class([self.shard], **defaults)

    def _flatten(self, tensors: list[Tensor]) -> Tensor:
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        return nn.functional.pad(flat, (0, -len(flat) % self.size))

    def reduce_gradients(self) -> None:
        """Have the average in `shard.grad`: call it to clip, or `step` does."""
        grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.params]
        self.shard.grad = torch.empty_like(self.shard)
        _reduce_scatter(self.shard.grad, self._flatten(grads), group=self.group)
        self.shard.grad /= self.size

    def step(self) -> None:
        if self.shard.grad is None:
            self.reduce_gradients()
        self.optimizer.step()
        self.shard.grad = None
        _all_gather(self.flat, self.shard.detach(), group=self.group)

    def zero_grad(self) -> None:
        for p in self.params:
            p.grad = None
