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
of the traffic, for the memory of the full weights. With a `replicate_group` N is the
ranks of one copy of several, see `xtrain.zero.hybrid`.

Rajbhandari et al., ZeRO, 2020; Zhao et al., PyTorch FSDP, 2023.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from xtrain.checkpoint.parameter_slice import all_ranks_of, placement_in
from xtrain.comm.checks import message_device, rank_and_size
from xtrain.comm.collective_choice import TORCH, Collectives, default_collectives
from xtrain.comm.wrapper_mesh import ranks_to_reduce
from xtrain.comm.wrapper_rules import check_counted, claim
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.flat_param_group import FlatParamGroup
from xtrain.zero.fsdp_checks import check_arguments
from xtrain.zero.fsdp_schedule import UnitSchedule
from xtrain.zero.fsdp_state import ShardedState
from xtrain.zero.fsdp_wrap import find_blocks, make_units
from xtrain.zero.hybrid import grid_of
from xtrain.zero.hybrid_checks import words_for
from xtrain.zero.structures import cast


class FullyShardedDataParallel(ShardedState):
    """Shard a module's parameters, gradients and optimizer state over the ranks.

    Build the optimizer over `parameters()` afterwards: they are the local pieces, views
    of flat shards, some of them empty. Names stay those of the bare module.

    Activation checkpointing works around units and inside them; with
    `use_reentrant=True` a unit is gathered once more. A unit gives a tensor, or tensors
    in lists, tuples, dictionaries and dataclasses.

    Args:
        module: the same architecture on every rank; rank 0's parameters and buffers are
            copied to all. One on torch's meta device takes no memory: its shards are
            zeros until `load_full` or `load_sharded` fills them.
        process_group: whose ranks share one copy of the model; None for all ranks, or
            for the replicas of a model on a mesh.
        replicate_group: of hybrid sharding, the ranks that hold the same shard of other
            copies; `xtrain.zero.hybrid.hybrid_groups` makes both groups.
        compute_dtype: of gathered weights, of the computation and of the gradients on
            their way; shards and their gradients keep the parameters' dtype.
        reshard_after_forward: free weights after forward and gather them again in
            backward; the root unit's stay in either case.
        blocks: module classes, or names of modules, that become a unit each; the
            children of every ModuleList unless given. The rest is the root unit.
        gradient_reduction: "average" (as torch does, the default) or "sum" (the default
            of a model on a mesh).
        collectives: TORCH, RING or DIRECT of `xtrain.comm.collective_choice`; what
            suits the backend unless given.
        fp32_gradients: add up 16-bit gradients in fp32, here and over the ranks; see
            `xtrain.comm.main_grad`. None: where the parameters have 16 bits; True: also
            where `compute_dtype` alone has.
        device: of the shards of a module on torch's meta device: where messages are,
            unless given; "meta" for the shapes alone, as a virtual cluster runs them.

    ValueError on every rank if one rank's model or arguments are wrong or differ.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        blocks: Iterable[type[nn.Module] | str] | None = None,
        gradient_reduction: str | None = None,
        collectives: Collectives | None = None,
        fp32_gradients: bool | None = None,
        device: torch.device | str | None = None,
        replicate_group: ProcessGroup | None = None,
    ):
        super().__init__()
        grid = grid_of(module, process_group, replicate_group)
        over = ranks_to_reduce(module, grid.everyone, gradient_reduction)
        blocks = None if blocks is None else list(blocks)
        options = {
            "replicate_group": words_for(grid.replicas),
            "reshard_after_forward": reshard_after_forward,
            "gradient_reduction": over.reduction,
            "collectives": collectives and collectives.name,
            "fp32_gradients": fp32_gradients,
            "device": device,
        }
        check_arguments(module, over, compute_dtype, blocks, options)
        self.module, self.process_group = module, over.group
        self.rank, self.size = rank_and_size(over.group)
        shards = over.group if grid.replicas is None else grid.shards
        self.compute_dtype = compute_dtype
        self.gradient_reduction = over.reduction
        first = next(module.parameters())
        if not first.is_meta:
            device = first.device
        device = torch.device(device or message_device(over.group))
        replicas = grid.make_replicas(collectives or TORCH)
        self.is_first_copy = replicas is None or replicas.rank == 0
        make_group = partial(
            FlatParamGroup,
            group=shards,
            replicas=replicas,
            compute_dtype=compute_dtype,
            collectives=collectives or default_collectives(shards, device),
            average=over.reduction == "average",
            fp32_gradients=fp32_gradients,
            device=device,
        )
        self.units = make_units(module, find_blocks(module, blocks), make_group)
        for buffer in module.buffers():
            dist.broadcast(buffer.detach(), group=over.group, group_src=0)
        self._schedule = UnitSchedule(self.units, reshard_after_forward)
        claim(self.parameters(), "FullyShardedDataParallel", axes=over.axes)

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

    @contextmanager
    def no_all_reduce(self) -> Iterator[None]:
        """Backwards inside sum over the ranks of a copy, and not over the copies.

        The first backward outside sums over the copies, or `reduce_gradients`. Until
        then a rank holds a shard of gradients more. Without copies it does nothing.
        """
        replicas = self._schedule.replicas
        with nullcontext() if replicas is None else replicas.defer():
            yield

    def reduce_gradients(self) -> None:
        """Reduce what `no_sync` and `no_all_reduce` have left, on every rank.

        Forwards whose backward is still to come may be on their way.
        """
        replicas = self._schedule.replicas
        with nullcontext() if replicas is None else replicas.defer(False):
            self._schedule.reduce_gradients()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget all gradients, also those that no optimizer knows of yet."""
        super().zero_grad(set_to_none)
        for unit in self.units:
            for group in unit.flat_groups:
                group.full_grad = group.copy_grad = None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients' norm over all ranks; returns what it was before.

        Of a module that is cut over other ranks too, theirs are among them. Of several
        copies the first counts.
        """
        check_counted(self.parameters())
        held = [(n, p.grad) for n, p in self.named_parameters() if p.grad is not None]
        first = self.is_first_copy
        return clip_sharded_grad_norm_(
            [gradient for _, gradient in held],
            max_norm,
            all_ranks_of(self.module, self.process_group),
            [first and placement_in(self.module, name).is_first for name, _ in held],
        )
