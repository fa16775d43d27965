"""ZeRO 3, also known as FSDP: every rank owns 1/N of everything.

    forward    gather block 0 | compute 0 | free 0
                    gather block 1 ....... | compute 1 | free 1
    backward                                  gather 1 | compute 1 | free 1, reduce 1
                                                  gather 0 ....... | compute 0 | ...

Weights exist in full for one block at a time, plus the next one, which is gathered
while this one computes. Gradients are reduce-scattered as each block's backward ends.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.agreement import as_text, check_same, problem_of
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives
from xtrain.comm.wrapper_rules import check_options, check_unwrapped, claim
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.flat_param_group import FlatParamGroup
from xtrain.zero.fsdp_checkpoint import load_full_units, load_units, save_units
from xtrain.zero.fsdp_schedule import UnitSchedule
from xtrain.zero.fsdp_unit import gather_parameters
from xtrain.zero.fsdp_wrap import find_blocks, make_units, materialise_buffers
from xtrain.zero.structures import cast


class FullyShardedDataParallel(nn.Module):
    """Shard a module's parameters, gradients and optimizer state over the ranks.

    Build the optimizer over `parameters()` afterwards: they are the local pieces, views
    of flat shards, some of them empty. Names stay those of the bare module.

    A module that was built on torch's meta device takes no memory: its shards begin as
    zeros, to be filled by `load_full` or `load_sharded`. Activation checkpointing works
    around whole blocks, with `use_reentrant=False`. A block's output is a tensor, or
    tensors in lists, tuples, dictionaries and dataclasses.

    Args:
        module: the same architecture on every rank; rank 0's parameters and buffers are
            copied to all.
        compute_dtype: of gathered weights, of the computation and of the gradients on
            their way; shards and their gradients keep the parameters' dtype.
        reshard_after_forward: free weights after forward and gather them again in
            backward; the root block's stay in either case.
        blocks: module classes, or names of modules, that are gathered one by one; the
            children of every ModuleList unless given. The rest is the root block.
        gradient_reduction: "average" (as torch does) or "sum".
        collectives: TORCH, RING or DIRECT; what suits the backend unless given, see
            `xtrain.comm.collective_choice`.

    All ranks must give the same.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
        blocks: Iterable[type[nn.Module] | str] | None = None,
        gradient_reduction: str = "average",
        collectives: Collectives | None = None,
    ):
        super().__init__()
        blocks = None if blocks is None else list(blocks)
        chosen: list[nn.Module] = []
        problem = problem_of(
            lambda: check_options(gradient_reduction),
            lambda: check_compute_dtype(compute_dtype),
            lambda: check_unwrapped(module, "FullyShardedDataParallel"),
            lambda: chosen.extend(find_blocks(module, blocks)),
            lambda: materialise_buffers(module, process_group),
        )
        named = [*module.named_parameters(), *module.named_buffers()]
        options = {
            "compute_dtype": compute_dtype,
            "reshard_after_forward": reshard_after_forward,
            "blocks": blocks and sorted(map(as_text, blocks)),
            "gradient_reduction": gradient_reduction,
            "collectives": collectives and collectives.name,
        }
        check_same("parameters", named, process_group, options, problem)
        self.module, self.process_group = module, process_group
        self.rank, self.size = rank_and_size(process_group)
        self.compute_dtype = compute_dtype
        aliases: dict[nn.Parameter, set[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, set()).add(name)
        self._aliases = {name: names for names in aliases.values() for name in names}
        make_group = partial(
            FlatParamGroup,
            group=process_group,
            compute_dtype=compute_dtype,
            collectives=collectives,
            average=gradient_reduction == "average",
        )
        self.units = make_units(module, chosen, make_group)
        claim(self.parameters(), "FullyShardedDataParallel")
        for buffer in module.buffers():
            dist.broadcast(buffer.detach(), group=process_group, group_src=0)
        self._schedule = UnitSchedule(self.units, reshard_after_forward)

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
        """Forget all gradients, also whole ones that `no_sync` has left.

        An optimizer's `zero_grad` does not know of those.
        """
        super().zero_grad(set_to_none)
        for unit in self.units:
            for group in unit.flat_groups:
                group.full_grad = None

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_parameters(*args, **kwargs)

    def named_buffers(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.named_buffers(*args, **kwargs)

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

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Scale all gradients so that their norm over all ranks is at most `max_norm`.

        Returns the norm before clipping.
        """
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        return clip_sharded_grad_norm_(grads, max_norm, self.process_group)

    @torch.no_grad()
    def full_state_dict(self) -> dict[str, Tensor]:
        """Every tensor of the bare module's `state_dict`, whole, on every rank."""
        whole = gather_parameters(self.units)
        names = {m: prefix for prefix, m in self.module.named_modules()}
        state = self.module.state_dict()
        for (module, name), tensor in whole.items():
            prefix = names[module]
            state[f"{prefix}.{name}" if prefix else name] = tensor
        return state

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
        group = self.process_group
        load_full_units(path, self.module, self.units, self._aliases, group)


def check_compute_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"compute_dtype={dtype} is no floating-point dtype")
