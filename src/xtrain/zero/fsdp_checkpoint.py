"""Checkpoints of ZeRO 3: what the units hold, as flat shards of named parameters."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint.bare_file import check_safetensors, read_safetensors
from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.parameter_slice import all_ranks_of, placement_in
from xtrain.checkpoint.pieces import Shard, persistent_buffers, whole
from xtrain.checkpoint.training_state import Write, load_checkpoint, save_checkpoint
from xtrain.comm.agreement import problem_of, raise_everywhere, raising_everywhere
from xtrain.comm.checks import rank_and_size
from xtrain.zero.flat_param_group import FlatParamGroup
from xtrain.zero.fsdp_unit import FSDPUnit


def save_units(
    directory: str | Path,
    step: int,
    module: nn.Module,
    units: list[FSDPUnit],
    optimizer: Optimizer | None,
    extra: dict[str, Any] | None,
    group: ProcessGroup | None,
    write: Write = save_pieces,
) -> Path:
    """Write the units' shards, their state, and rank 0's buffers of `module`."""
    shards = shards_of(units, module)
    if rank_and_size(group)[0] == 0:
        shards += buffers_of(module)
    all_ranks = all_ranks_of(module, group)
    return save_checkpoint(directory, step, shards, optimizer, extra, all_ranks, write)


def load_units(
    path: str | Path,
    module: nn.Module,
    units: list[FSDPUnit],
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
) -> tuple[int, dict[str, Any] | None]:
    """Fill the units' shards, their state and the buffers; its step and extra."""
    shards = shards_of(units, module) + buffers_of(module)
    return load_checkpoint(path, shards, optimizer, all_ranks_of(module, group))


def load_full_units(
    path: str | Path,
    module: nn.Module,
    units: list[FSDPUnit],
    group: ProcessGroup | None,
) -> None:
    """Read a bare model's file, each rank its own elements."""
    aliases = aliases_in(module)
    wanted = [(shard, aliases[shard.name]) for shard in shards_of(units, module)]
    wanted += [(shard, {shard.name}) for shard in buffers_of(module)]
    all_ranks = all_ranks_of(module, group)
    with raising_everywhere(CheckpointError, group=all_ranks):
        check_safetensors(path, wanted)
    with raising_everywhere(CheckpointError, group=all_ranks):
        read_safetensors(path, wanted)


@torch.no_grad()
def full_state(module: nn.Module, units: list[FSDPUnit]) -> dict[str, Tensor]:
    """The bare module's `state_dict`: copies of all parameters, whole, and buffers."""
    names = {m: f"{prefix}." * bool(prefix) for prefix, m in module.named_modules()}
    state = module.state_dict()
    for group in groups_of(units):
        layout = group.layout
        flat = group.shard.new_empty(layout.padded_numel)
        group.collectives.all_gather(flat, group.shard, group=group.group).wait()
        for view, owners in zip(layout.views(flat), group.owners, strict=True):
            whole_tensor = view.clone()
            for owner, name in owners:
                state[names[owner] + name] = whole_tensor
    return state


@torch.no_grad()
def load_full_state(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, Size],
    module: nn.Module,
    units: list[FSDPUnit],
    process_group: ProcessGroup | None,
) -> None:
    """Copy this rank's pieces of whole tensors, and buffers.

    ValueError on every rank unless all of `state` has the names of the module's tensors
    and the `shapes` of its parameters.
    """
    buffers = persistent_buffers(module)
    problem = problem_of(
        lambda: check_state(state, shapes, buffers, aliases_in(module))
    )
    raise_everywhere(ValueError, problem, process_group)
    for group in groups_of(units):
        for piece, slot, name in zip(
            group.local_shards, group.layout.slots, group.names, strict=True
        ):
            start, stop = group.layout.piece_bounds(slot, group.rank)
            piece.copy_(state[name].reshape(-1)[start:stop])
    for name, buffer in buffers.items():
        buffer.copy_(state[name])


def check_state(
    state: Mapping[str, Tensor],
    shapes: Mapping[str, Size],
    buffers: Mapping[str, Tensor],
    aliases: Mapping[str, set[str]],
) -> None:
    """ValueError unless whole tensors have the names and shapes of a module's state."""
    known = {a: shape for name, shape in shapes.items() for a in aliases[name]}
    known |= {name: buffer.shape for name, buffer in buffers.items()}
    if differing := sorted(known.keys() ^ state.keys()):
        name = differing[0]
        where = "missing" if name in known else "unknown"
        raise ValueError(f"{len(differing)} names differ; {name} is {where} in state")
    for name, shape in known.items():
        if state[name].shape != shape:
            raise ValueError(
                f"{name} is {list(state[name].shape)} in state, and {list(shape)} here"
            )


def shards_of(units: list[FSDPUnit], module: nn.Module) -> list[Shard]:
    """This rank's part of every parameter, or of its slice of a module that is cut."""
    found = []
    for group in groups_of(units):
        layout = group.layout
        for piece, slot, name in zip(
            group.local_shards, layout.slots, group.names, strict=True
        ):
            start, _ = layout.piece_bounds(slot, group.rank)
            place = placement_in(module, name)
            found.append(place.flat_shard(name, slot.shape, start, piece))
    return found


def buffers_of(module: nn.Module) -> list[Shard]:
    return [whole(name, t) for name, t in persistent_buffers(module).items()]


def groups_of(units: list[FSDPUnit]) -> list[FlatParamGroup]:
    return [group for unit in units for group in unit.flat_groups]


def aliases_in(module: nn.Module) -> dict[str, set[str]]:
    """By each name of a parameter, all its names: tied weights have several."""
    found: dict[nn.Parameter, set[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(parameter, set()).add(name)
    return {name: names for names in found.values() for name in names}
