"""Data parallelism in its simplest form: the same model everywhere, gradients averaged.

    rank r:   same weights -> own batch -> own loss -> own gradients
              all-reduce every gradient, divide by N
              same gradients -> same update -> same weights again

It is correct and slow, for two reasons that `DistributedDataParallel` removes: one
collective a parameter pays the latency each time, and messages wait for backward.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from xtrain.comm.wrapper_mesh import ranks_to_reduce
from xtrain.comm.wrapper_rules import mark_as_summed
from xtrain.data_parallel.replicas import check_model


class NaiveDataParallel(nn.Module):
    """Wrap a module; call `reduce_gradients()` between `backward()` and `step()`.

    Args:
        module: the same architecture on every rank; rank 0's parameters and buffers are
            copied to all.
        process_group: None for all ranks, or for the replicas of a model on a mesh.
        gradient_reduction: "average" (as torch does, the default) or "sum" (the default
            of a model on a mesh).

    Each rank sends 2(N-1)/N of the gradients a step, in one all-reduce a parameter.
    ValueError on every rank if one rank's model or arguments are wrong or differ.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        gradient_reduction: str | None = None,
    ):
        super().__init__()
        over = ranks_to_reduce(module, process_group, gradient_reduction)
        options = {"gradient_reduction": over.reduction}
        check_model(module, over, "NaiveDataParallel", options)
        mark_as_summed(module.parameters(), over.axes)

        self.module, self.process_group = module, over.group
        self._size = dist.get_world_size(over.group)
        self._average = over.reduction == "average"
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=over.group, group_src=0)

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
