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

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint.parameter_slice import all_ranks_of, placement_in
from xtrain.comm.checks import message_device, rank_and_size
from xtrain.comm.collective_choice import Collectives, default_collectives
from xtrain.comm.wrapper_mesh import ranks_to_reduce
from xtrain.comm.wrapper_rules import check_counted, claim
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.flat_param_group import FlatParamGroup
from xtrain.zero.fsdp_checkpoint import (
    full_state,
    load_full_state,
    load_full_units,
    load_units,
    save_units,
)
from xtrain.zero.fsdp_checks import check_arguments
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
            copied to all. One on torch's meta device takes no memory: its shards are
            zeros until `load_full` or `load_sharded` fills them.
        process_group: None for all ranks, or for the replicas of a model on a mesh.
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
    ):
        super().__init__()
        over = ranks_to_reduce(module, process_group, gradient_reduction)
        blocks = None if blocks is None else list(blocks)
        options = {
            "reshard_after_forward": reshard_after_forward,
            "gradient_reduction": over.reduction,
            "collectives": collectives and collectives.name,
            "fp32_gradients": fp32_gradients,
            "device": device,
        }
        check_arguments(module, over, compute_dtype, blocks, options)
        self.module, self.process_group = module, over.group
        self.rank, self.size = rank_and_size(over.group)
        self.compute_dtype = compute_dtype
        self.gradient_reduction = over.reduction
        first = next(module.parameters())
        if not first.is_meta:
            device = first.device
        device = torch.device(device or message_device(over.group))
        make_group = partial(
            FlatParamGroup,
            group=over.group,
            compute_dtype=compute_dtype,
            collectives=collectives or default_collectives(over.group, device),
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

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clip the gradients' norm over all ranks; returns what it was before.

        Of a module that is cut over other ranks too, theirs are among them.
        """
        check_counted(self.parameters())
        held = [(n, p.grad) for n, p in self.named_parameters() if p.grad is not None]
        return clip_sharded_grad_norm_(
            [gradient for _, gradient in held],
            max_norm,
            all_ranks_of(self.module, self.process_group),
            [placement_in(self.module, name).is_first for name, _ in held],
        )

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """This rank's pieces of the parameters, flat, and the buffers.

        Under the bare module's names, as `named_parameters`. Only the same rank of as
        many ranks can load it: `full_state_dict` gives whole tensors, `save_sharded`
        writes what any number of ranks can load.
        """
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load what `state_dict` gave on this rank."""
        return self.module.load_state_dict(*args, **kwargs)

    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the bare module's `state_dict`, whole, on every rank."""
        return full_state(self.module, self.units)

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces of whole tensors: the inverse of `full_state_dict`.

        Every rank calls it with the same. ValueError on every rank, and nothing has
        changed, unless names and shapes are those of the bare module.
        """
        shapes, group = self.full_shapes(), self.process_group
        load_full_state(state, shapes, self.module, self.units, group)

    def full_shapes(self) -> dict[str, Size]:
        """The whole shape of every parameter, by name: pieces are flat.

        Use it where an optimizer's groups depend on the number of dimensions.
        """
        groups = [group for unit in self.units for group in unit.flat_groups]
        return {
            name: slot.shape
            for group in groups
            for name, slot in zip(group.names, group.layout.slots, strict=True)
        }

    def save_sharded(
        self,
        directory: str | Path,
        step: int,
        optimizer: Optimizer | None = None,
        extra: dict[str, Any] | None = None,
    ) -> Path:
        """Write a checkpoint, every rank its pieces; see `xtrain.checkpoint`."""
        group = self.process_group
        return save_units(
            directory, step, self.module, self.units, optimizer, extra, group
        )

    def load_sharded(
        self, path: str | Path, optimizer: Optimizer | None = None
    ) -> tuple[int, dict[str, Any] | None]:
        """Read a checkpoint of any stage and world size, or a run's latest.

        Returns its step and extra. CheckpointError on every rank if it does not fit,
        CheckpointReplaced if it vanished meanwhile and another load may work.
        """
        group = self.process_group
        return load_units(path, self.module, self.units, optimizer, group)

    def load_full(self, path: str | Path) -> None:
        """Read a bare model's safetensors file, each rank only its own ranges.

        Names and shapes must fit. Floating-point weights are converted to the model's
        dtype, rounded to the nearest; any other difference of dtype is refused. Of tied
        weights that the file has under several names, the first by name is read.
        CheckpointError on every rank if the file is wrong on one; as far as names,
        shapes and dtypes tell, nothing has changed then.
        """
        load_full_units(path, self.module, self.units, self.process_group)
