"""The `FullyShardedDataParallel` that `xtrain.zero` exports: checks, checkpoints.

    fsdp.FullyShardedDataParallel            the algorithm
    checked_fsdp.FullyShardedDataParallel    arguments compared on all ranks first;
                                             checkpoints

An algorithm trusts its arguments, so that it can be read and copied alone. Here a wrong
argument of one rank is an error on every rank, before anything is sent.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint.parameter_slice import all_ranks_of, placement_in
from xtrain.checkpoint.pieces import persistent_buffers
from xtrain.comm.agreement import as_text, check_same, problem_of, raise_everywhere
from xtrain.comm.checks import message_device
from xtrain.comm.collective_choice import Collectives, default_collectives
from xtrain.comm.wrapper_mesh import ranks_to_reduce
from xtrain.comm.wrapper_rules import (
    check_counted,
    check_options,
    check_unwrapped,
    claim,
)
from xtrain.zero.clip import clip_sharded_grad_norm_
from xtrain.zero.flat_param_group import FlatParamGroup
from xtrain.zero.fsdp import FullyShardedDataParallel as BareFullyShardedDataParallel
from xtrain.zero.fsdp_checkpoint import (
    check_state,
    load_full_units,
    load_state,
    load_units,
    save_units,
)
from xtrain.zero.fsdp_unit import gather_parameters
from xtrain.zero.fsdp_wrap import find_blocks
from xtrain.zero.grad_scaler import shard_gradient


class ScalableFlatParamGroup(FlatParamGroup):
    """Its gradients let torch's GradScaler ask all ranks, see `grad_scaler`."""

    def as_gradient(self, part: Tensor) -> Tensor:
        return shard_gradient(part, self.group)


class FullyShardedDataParallel(BareFullyShardedDataParallel):
    """`fsdp.FullyShardedDataParallel`, wrong arguments refused everywhere; checkpoints.

    The arguments are those of the algorithm, in `xtrain.zero.fsdp`. A model on a mesh
    knows its `process_group` and "sum": leave them out. A module that was
    built on torch's meta device takes no memory: its shards begin as zeros, to be
    filled by `load_full` or `load_sharded`.
    """

    _group_class = ScalableFlatParamGroup

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
    ):
        blocks = None if blocks is None else list(blocks)
        over = ranks_to_reduce(module, process_group, gradient_reduction)
        process_group, gradient_reduction = over.group, over.reduction
        problem = problem_of(
            over.check,
            lambda: check_options(over.reduction),
            lambda: check_compute_dtype(compute_dtype),
            lambda: check_unwrapped(module, "FullyShardedDataParallel"),
            lambda: check_blocks(module, blocks),
            lambda: materialise_buffers(module, process_group),
        )
        named = [*module.named_parameters(), *module.named_buffers()]
        options = {
            "compute_dtype": compute_dtype,
            "reshard_after_forward": reshard_after_forward,
            "blocks": blocks and sorted(map(as_text, blocks)),
            "gradient_reduction": gradient_reduction,
            "collectives": collectives and collectives.name,
            "fp32_gradients": fp32_gradients,
        }
        check_same("parameters", named, process_group, options, problem)
        first = next(module.parameters())
        device = message_device(process_group) if first.is_meta else first.device
        super().__init__(
            module,
            process_group,
            compute_dtype,
            reshard_after_forward,
            blocks,
            gradient_reduction,
            collectives or default_collectives(process_group, device),
            fp32_gradients,
        )
        claim(self.parameters(), "FullyShardedDataParallel", axes=over.axes)
        aliases: dict[nn.Parameter, set[str]] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            aliases.setdefault(parameter, set()).add(name)
        self._aliases = {name: names for names in aliases.values() for name in names}

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

    def load_full_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's pieces of whole tensors: the inverse of `full_state_dict`.

        Every rank calls it with the same. ValueError on every rank, and nothing has
        changed, unless names and shapes are those of the bare module.
        """
        buffers = persistent_buffers(self.module)
        problem = problem_of(
            lambda: check_state(state, self.full_shapes(), buffers, self._aliases)
        )
        raise_everywhere(ValueError, problem, self.process_group)
        load_state(state, self.units, buffers)

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
        group = self.process_group
        load_full_units(path, self.module, self.units, self._aliases, group)


def check_compute_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"compute_dtype={dtype} is not a floating-point dtype")


def check_blocks(
    module: nn.Module, blocks: Iterable[type[nn.Module] | str] | None
) -> None:
    known = dict(module.named_modules())
    names = {block for block in blocks or () if isinstance(block, str)}
    unknown = sorted(names - known.keys())
    if unknown:
        raise ValueError(
            f"blocks {unknown}: no such modules; there are {sorted(known)}"
        )
    find_blocks(module, blocks)  # what is neither a name nor a class


def materialise_buffers(module: nn.Module, group: ProcessGroup | None) -> None:
    """Give buffers on the meta device memory; ValueError if nothing would fill them."""
    kept = module.state_dict().keys()
    for prefix, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            name = f"{prefix}.{key}" if prefix else key
            if name not in kept:
                raise ValueError(
                    f"buffer {name} is on the meta device and not part of the model's "
                    "state: no checkpoint would fill it"
                )
            owner._buffers[key] = torch.zeros_like(buffer, device=message_device(group))
