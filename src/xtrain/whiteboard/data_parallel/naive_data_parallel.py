"""Naive data parallelism: the same model on every rank, gradients averaged.

    same weights -> own batch -> own gradients -> all-reduce, divide by N -> same update

Computes:   the average of every gradient over the ranks, between backward and step.
Sends:      2(N-1)/N of the gradients a step, in one all-reduce a parameter.
Leaves out: buckets, overlap, fp32 sums of 16-bit gradients, changing buffers, checks.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn


class NaiveDataParallel(nn.Module):
    """Call `reduce_gradients()` between `backward()` and `step()`."""

    def __init__(self, module: nn.Module, process_group: Any = None):
        super().__init__()
        self.module, self.group = module, process_group
        for tensor in (*module.parameters(), *module.buffers()):  # begin as rank 0
            dist.broadcast(tensor.detach(), group=process_group, group_src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def reduce_gradients(self) -> None:
        """Average the gradients. To average the loss would change none of them."""
        size = dist.get_world_size(self.group)
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # unused here, but others wait for us
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.group)
                parameter.grad /= size
