"""Checkpoints of ZeRO 3: what the blocks hold, as pieces of named parameters."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.checkpoint import (
    CheckpointError,
    Piece,
    check_safetensors,
    read_safetensors,
)
from xtrain.checkpoint import training_state as resume
from xtrain.comm.agreement import raising_everywhere
from xtrain.zero.fsdp_unit import FSDPUnit


def save_blocks(
    directory: str | Path,
    step: int,
    module: nn.Module,
    blocks: list[FSDPUnit],
    optimizer: Optimizer | None,
    extra: dict[str, Any] | None,
    group: ProcessGroup | None,
) -> Path:
    """Write the blocks' shards, their state, and the buffers of `module`."""
    places, states = find_places(blocks), resume.States()
    if optimizer is not None:
        states = {piece: optimizer.state.get(piece, {}) for piece in places}
    buffers = resume.persistent_buffers(module)
    return resume.save(
        directory, step, places, buffers, states, optimizer, extra, group
    )


def load_blocks(
    path: str | Path,
    module: nn.Module,
    blocks: list[FSDPUnit],
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
) -> tuple[int, dict[str, Any] | None]:
    """Fill the blocks' shards, their state and the buffers; its step and extra."""
    places = find_places(blocks)

    def make_states(saved: resume.Saved) -> resume.States:
        assert optimizer is not None
        on_device = resume.wants_numbers_on_device(optimizer)
        for piece, (name, _, _) in places.items():
            kinds = saved.get(name, {})
            optimizer.state[piece] = resume.empty_state(piece, kinds, on_device)
            if not kinds:
                del optimizer.state[piece]
        return optimizer.state

    buffers = resume.persistent_buffers(module)
    return resume.load(path, places, buffers, make_states, optimizer, group)


def load_full_blocks(
    path: str | Path,
    module: nn.Module,
    blocks: list[FSDPUnit],
    aliases: dict[str, set[str]],
    group: ProcessGroup | None,
) -> None:
    """Read a bare model's file, each rank its own ranges.

    `aliases` has all names of each parameter: of tied ones a file often has one.
    """
    wanted = [
        (Piece(*place, data=tensor.detach()), aliases[place[0]])
        for tensor, place in find_places(blocks).items()
    ]
    buffers = resume.persistent_buffers(module)
    for name, buffer in buffers.items():
        data = torch.empty_like(buffer).reshape(-1)
        wanted.append((Piece(name, tuple(buffer.shape), 0, data), {name}))
    with raising_everywhere(CheckpointError, group=group):
        check_safetensors(path, wanted)
    with raising_everywhere(CheckpointError, group=group):
        read_safetensors(path, wanted)
    for piece, _ in wanted:
        if piece.name in buffers:
            buffers[piece.name].copy_(piece.data.view(piece.shape))


def find_places(blocks: list[FSDPUnit]) -> dict[Tensor, resume.Place]:
    """Every local piece with the name, shape and first element of its parameter."""
    places: dict[Tensor, resume.Place] = {}
    for group in (group for unit in blocks for group in unit.flat_groups):
        layout = group.layout
        for piece, slot, name in zip(
            group.local_shards, layout.slots, group.names, strict=True
        ):
            start, _ = layout.piece_bounds(slot, group.rank)
            places[piece] = (name, tuple(slot.shape), start)
    return places
