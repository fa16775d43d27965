"""ZeRO 3, also known as FSDP: every rank owns 1/N of everything.

    forward    unshard 0 | compute 0 | reshard 0
                     unshard 1 ..... | compute 1 | reshard 1
    backward                               unshard 1 | compute 1 | reshard 1, reduce 1
                                                 unshard 0 ..... | compute 0 | ...

The model is cut into units, usually a layer each. To unshard a unit is to all-gather
its weights, to reshard it is to free them again. Weights exist in full for one unit at
a time, plus the next one, which is gathered while this one computes. Gradients are
reduce-scattered as each unit's backward ends.
So a step sends three times (N-1)/N of the parameters, all-gather, all-gather,
reduce-scatter, where plain data parallelism sends two; and memory is 16/N bytes per
parameter with Adam.

With `reshard_after_forward=False` weights stay between forward and backward: two thirds
of the traffic, for the memory of the full weights.

Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import TORCH, Collectives
from xtrain.zero.flat_param_group import FlatParamGroup
from xtrain.zero.fsdp_schedule import UnitSchedule
from xtrain.zero.fsdp_wrap import find_blocks, make_units
from xtrain.zero.structures import cast


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks.

    Build the optimizer over `parameters()` afterwards: they are the local pieces, views
    of flat shards, some of them empty. Names stay those of the bare module.

    Activation checkpointing works around units and inside them; with
    `use_reentrant=True` a unit is gathered once more. A unit gives a tensor, or tensors
    in lists, tuples, dictionaries and dataclasses.

    Args:
        module: the same architecture on every rank; rank 0's parameters and buffers are
            copied to all.
        compute_dtype: of gathered weights, of the computation and of the gradients on
            their way; shards and their gradients keep the parameters' dtype.
        reshard_after_forward: free weights after forward and gather them again in
            backward; the root unit's stay in either case.
        blocks: module classes, or names of modules, that become a unit each; the
            children of every ModuleList unless given. The rest is the root unit.
        gradient_reduction: "average" (as torch does) or "sum".
        collectives: TORCH, RING or DIRECT of `xtrain.comm.collective_choice`; that of
            `xtrain.zero` takes what suits the backend unless given.
        fp32_gradients: add up 16-bit gradients in fp32, here and over the ranks; see
            `xtrain.comm.main_grad`. None: where the parameters have 16 bits; True: also
            where `compute_dtype` alone has.

    All ranks must give the same.
    """

    _group_class = FlatParamGroup

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        blocks: Iterable[type[nn.Module] | str] | None = None,
        gradient_reduction: str = "average",
        collectives: Collectives = TORCH,
        fp32_gradients: bool | None = None,
    ):
        super().__init__()
        chosen = find_blocks(module, blocks)
        self.module, self.process_group = module, process_group
        self.rank, self.size = rank_and_size(process_group)
        self.compute_dtype = compute_dtype
        self.gradient_reduction = gradient_reduction
        make_group = partial(
            self._group_class,
            group=process_group,
            compute_dtype=compute_dtype,
            collectives=collectives,
            average=gradient_reduction == "average",
            fp32_gradients=fp32_gradients,
        )
        self.units = make_units(module, chosen, make_group)
        for buffer in module.buffers():
            dist.broadcast(buffer.detach(), group=process_group, group_src=0)
        self._schedule = UnitSchedule(self.units, reshard_after_forward)

    @torch._disable_dynamo
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self._schedule.begin_forward()
        if self.compute_dtype is not None:
            args, kwargs = cast((args, kwargs), self.compute_dtype)
        try:
            output = self.module(*args, **kwargs)
        except BaseException:
            self.units[0].use_shards()
            raise
        self._schedule.end_forward(output)
        return output

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards inside add up whole gradients on each rank and send none of them.

        The first backward outside reduces the sums; `reduce_gradients` does it without
        one. Until then a rank holds the gradients of the whole model, 4 bytes per
        parameter (8 in float64), and the root's weights. With
        `reshard_after_forward=False` it holds all weights, which are gathered once for
        all micro-batches: so do not change them inside.
        """
        before = self._schedule.sync
        self._schedule.set_sync(False)
        try:
            yield
        finally:
            self._schedule.set_sync(before)

    def reduce_gradients(self) -> None:
        """Reduce what `no_sync` has accumulated, on every rank; otherwise do nothing.

        Forwards whose backward is still to come may be on their way.
        """
        self._schedule.reduce_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those of `no_sync` that no optimizer knows of."""
        super().zero_grad(set_to_none)
        for unit in self.units:
            for group in unit.flat_groups:
                group.full_grad = None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)
