"""The wrappers that `xtrain.data_parallel` exports: algorithms with checks around them.

    ddp.DistributedDataParallel        the algorithm
    checked.DistributedDataParallel    its arguments compared on all ranks first; join()

An algorithm trusts its arguments, so that it can be read and copied alone. A rank that
was given others would train on and be wrong, or wait for ever, so here a wrong argument
is an error on every rank before anything is sent.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import problem_of
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.comm.wrapper_mesh import ranks_to_reduce
from xtrain.comm.wrapper_rules import (
    check_filled,
    check_options,
    check_unwrapped,
    claim,
    mark_as_summed,
)
from xtrain.data_parallel.ddp import DistributedDataParallel as BareDataParallel
from xtrain.data_parallel.ddp import broadcast_all
from xtrain.data_parallel.join import JoinState, join
from xtrain.data_parallel.naive import NaiveDataParallel as BareNaiveDataParallel
from xtrain.data_parallel.same_model import (
    check_same_model,
    check_trainable,
    named_tensors,
)


class NaiveDataParallel(BareNaiveDataParallel):
    """`naive.NaiveDataParallel` that refuses a wrong argument on every rank."""

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        gradient_reduction: str | None = None,
    ):
        over = ranks_to_reduce(module, process_group, gradient_reduction)
        process_group, gradient_reduction = over.group, over.reduction
        problem = problem_of(
            over.check,
            lambda: check_options(over.reduction),
            lambda: check_unwrapped(module, "NaiveDataParallel"),
            lambda: check_filled(named_tensors(module)),
        )
        options = {"gradient_reduction": gradient_reduction}
        check_same_model(module, process_group, options, problem)
        super().__init__(module, process_group, gradient_reduction)
        mark_as_summed(module.parameters(), over.axes)


class DistributedDataParallel(BareDataParallel):
    """`ddp.DistributedDataParallel`, wrong arguments refused on every rank, and `join`.

    The arguments are those of the algorithm, in `xtrain.data_parallel.ddp`, but for the
    `collectives`: torch's all-reduce (TORCH) or one of lc1 (RING, DIRECT). A model on
    a mesh knows its `process_group` and "sum": leave them out.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        bucket_cap_mb: float = 25,
        broadcast_buffers: bool = True,
        find_unused_parameters: bool = False,
        gradient_reduction: str | None = None,
        collectives: Collectives = TORCH,
        fp32_gradients: bool | None = None,
    ):
        over = ranks_to_reduce(module, process_group, gradient_reduction)
        process_group, gradient_reduction = over.group, over.reduction
        problem = problem_of(
            over.check,
            lambda: check_options(over.reduction, bucket_cap_mb),
            lambda: check_unwrapped(module, "DistributedDataParallel"),
            lambda: check_filled(named_tensors(module)),
            lambda: check_trainable(module),
        )
        options = {
            "bucket_cap_mb": bucket_cap_mb,
            "broadcast_buffers": broadcast_buffers,
            "find_unused_parameters": find_unused_parameters,
            "gradient_reduction": gradient_reduction,
            "collectives": collectives.name,
            "fp32_gradients": fp32_gradients,
        }
        check_same_model(module, process_group, options, problem)
        super().__init__(
            module,
            process_group,
            bucket_cap_mb,
            broadcast_buffers,
            find_unused_parameters,
            gradient_reduction,
            collectives.all_reduce,
            fp32_gradients,
        )
        trainable = [p for p in module.parameters() if p.requires_grad]
        claim(trainable, "DistributedDataParallel", axes=over.axes)
        self._join_state: JoinState | None = None  # inside join()

    def load_state_dict(
        self, state_dict: Mapping[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Load what `state_dict` gave here, or torch's wrapper, with "module."."""
        own = self.module.state_dict().keys()
        if not any(name in own for name in state_dict):
            state_dict = {n.removeprefix("module."): t for n, t in state_dict.items()}
        return super().load_state_dict(state_dict, *args, **kwargs)

    def join(
        self, divide_by_initial_world_size: bool = True
    ) -> AbstractContextManager[None]:
        """Context in which ranks may have different numbers of batches."""
        return join(self, divide_by_initial_world_size)

    def _before_forward(self) -> None:
        if self._join_state is None:
            self._synchronise_buffers()
        elif torch.is_grad_enabled():
            self._take_part_in_join()

    def reduce_gradients(self) -> None:
        if self._is_local:
            self._take_part_in_join()
        super().reduce_gradients()

    def _take_part_in_join(self) -> None:
        if self._join_state is not None:
            self._join_state.begin_step()
            self._synchronise_buffers(self._join_state.source_rank)

    def _finish(self, unused: list[nn.Parameter], shadow: bool = False) -> None:
        if self._join_state is not None:
            self._join_state.in_step = False
        super()._finish(unused, shadow)

    def _shadow(self, source_rank: int) -> None:
        """Take part in a step of the others, with gradients of zero."""
        self._synchronise_buffers(source_rank)
        for bucket in self._reducer.buckets:
            bucket.flat.zero_()
            bucket.waiting.clear()
        self._finish([], shadow=True)
        self.zero_grad()  # the others' gradients are none of this rank's
        self._reduced.clear()

    def _copy_from(self, source_rank: int) -> None:
        tensors = [*self.module.parameters(), *self.module.buffers()]
        broadcast_all(tensors, self.process_group, source_rank)
