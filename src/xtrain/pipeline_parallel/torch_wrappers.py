"""torch's own DDP and FSDP2 around a stage, as the runner needs them.

    backwards of a step    nothing is sent: gradients add up on each rank
    REDUCE of the stage    the wrapper reduces what has added up, by its own means

DDP reduces what autograd leaves in `grad`, when its hooks have seen every parameter. So
`reduce_gradients` lets them see all: a backward that adds zeros. FSDP2 keeps whole
gradients until it is told that they are the last, and is called as in torch's own
pipelines, torch/distributed/pipelining/stage.py.

Both average, and the runner divides by the count of the whole batch, so what they leave
is multiplied by what they have divided by.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

SHARDED = "set_requires_gradient_sync"
"""A method of modules that `fully_shard` has been called with."""
UNUSED = "set_reduce_scatter_unused_params"
"""Another one, which torch 2.11 does not have."""


@dataclass(frozen=True)
class TorchDDP:
    """`reduce_gradients` of a torch.nn.parallel.DistributedDataParallel."""

    module: Any
    gradient_reduction = "sum"

    @property
    def process_group(self) -> ProcessGroup:
        return self.module.process_group

    def problem(self) -> str | None:
        """What a pipeline cannot do with it."""
        if self.module.static_graph:
            return "static_graph=True counts backwards, and a step has several"
        return None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        with self.module.no_sync():
            yield

    def reduce_gradients(self) -> None:
        parameters = [p for p in self.module.parameters() if p.requires_grad]
        self.module.reducer.prepare_for_backward(parameters)
        zeros = [torch.zeros((), dtype=p.dtype, device=p.device) for p in parameters]
        torch.autograd.backward(
            parameters, [z.expand_as(p) for z, p in zip(zeros, parameters, strict=True)]
        )
        multiply(parameters, self.process_group.size())


@dataclass(frozen=True)
class TorchFSDP:
    """`reduce_gradients` of a module that torch's `fully_shard` shards."""

    module: Any
    gradient_reduction = "sum"

    @property
    def process_group(self) -> ProcessGroup:
        return self.groups()[0].mesh_info.shard_process_group

    def groups(self) -> list[Any]:
        """Its parts that are gathered and reduced as one."""
        states = [m._get_fsdp_state() for m in self.sharded()]
        return [group for state in states for group in state._fsdp_param_groups]

    def sharded(self) -> list[Any]:
        return [m for m in self.module.modules() if hasattr(m, SHARDED)]

    def problem(self) -> str | None:
        """What a pipeline cannot do with it."""
        if not hasattr(self.module, UNUSED):
            return (
                f"fully_shard of torch {torch.__version__} reduces no parameter that "
                "has no gradient, which ranks would differ in: torch 2.13 can"
            )
        if any(group.mesh_info.mesh.ndim > 1 for group in self.groups()):
            return "it shards over one axis of a mesh of several; give it one axis"
        return None

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self._is_last(False)
        try:
            yield
        finally:
            self._is_last(True)
            self.reshard()
            for parameter in (p for group in self.groups() for p in group.fsdp_params):
                parameter.unsharded_accumulated_grad = None  # of a step that failed

    def reduce_gradients(self) -> None:
        self._is_last(True)
        self.module.set_reduce_scatter_unused_params(True)  # as on the other ranks
        for group in self.groups():
            group.post_backward()
        self.module._get_fsdp_state()._root_post_backward_final_callback()
        for group in self.groups():
            divided = group.gradient_divide_factor or self.process_group.size()
            multiply([p.sharded_param for p in group.fsdp_params], divided)

    def reshard(self) -> None:
        for module in self.sharded():
            module.reshard()

    def _is_last(self, last: bool) -> None:
        self.module.set_is_last_backward(last)
        self.module.set_reshard_after_backward(last)
        self.module.set_requires_gradient_sync(last)


TorchWrapper = TorchDDP | TorchFSDP


def torch_reduction(module: nn.Module) -> TorchWrapper | None:
    """How a module's wrapper of torch's reduces; None without one."""
    if isinstance(module, nn.parallel.DistributedDataParallel):
        return TorchDDP(module)
    return TorchFSDP(module) if hasattr(module, SHARDED) else None


@torch.no_grad()
def multiply(parameters: list[Any], by: float) -> None:
    gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
    for gradient in gradients:
        gradient.mul_(by)
