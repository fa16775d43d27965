"""Data parallelism in its simplest form: the same model everywhere, gradients averaged.

    rank r:   same weights -> own batch -> own loss -> own gradients
              all-reduce every gradient, divide by N
              same gradients -> same update -> same weights again

It is right, and slow in two ways that `DistributedDataParallel` mends: one collective a
parameter pays the latency over and over, and nothing is sent while backward computes.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup


class NaiveDataParallel(nn.Module):
    """Wrap a module; call `reduce_gradients()` between `backward()` and `step()`.

    Args:
        module: the same architecture on every rank; rank 0's parameters and buffers are
            copied to all.
        gradient_reduction: "average" (as torch does) or "sum".

    Each rank sends 2(N-1)/N of the gradients a step, in one all-reduce a parameter.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        gradient_reduction: str = "average",
    ):
        super().__init__()
        self.module, self.process_group = module, process_group
        self._size = dist.get_world_size(process_group)
        self._average = gradient_reduction == "average"
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=process_group, group_src=0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def reduce_gradients(self) -> None:
        """Average the gradients over the ranks. Reducing the loss would not do it.

        A parameter that took no part on this rank has a gradient of zero here.
        """
        for parameter in self.module.parameters():
            if parameter.requires_grad:
                if parameter.grad is None:  # unused here; others may wait for us
                    parameter.grad = torch.zeros_like(parameter)
                dist.all_reduce(parameter.grad, group=self.process_group)
                if self._average:
                    parameter.grad.div_(self._size)
