"""Checkpoints of ZeRO 1 and 2: what the buckets hold, as pieces of named parameters.

bucket   | weight     | bias | ...      masters of one rank's shard, stepped as one
pieces     weight[2:]   bias            what any stage and world size can load
"""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.checks import rank_and_size
from xtrain.zero import resume
from xtrain.zero.agreement import raising_everywhere
from xtrain.zero.buckets import Bucket

Pieces = dict[Bucket, list[Tensor]]  # views of the masters, one for each parameter


def save_buckets(
    directory: str | Path,
    step: int,
    module: nn.Module,
    buckets: list[Bucket],
    optimizer: Optimizer,
    extra: dict[str, Any] | None,
    group: ProcessGroup | None,
) -> Path:
    """Write the masters of all buckets and their state, and what is whole of `module`.

    `optimizer` steps the buckets' masters.
    """
    rank, _ = rank_and_size(group)
    pieces = pieces_of(buckets, rank)
    with raising_everywhere(ValueError, group=group):
        places, whole = find_places(pieces, module, rank), find_whole(buckets, module)
    states = cut_states(pieces, optimizer, rank)
    return resume.save(directory, step, places, whole, states, optimizer, extra, group)


def load_buckets(
    path: str | Path,
    module: nn.Module,
    buckets: list[Bucket],
    optimizer: Optimizer,
    group: ProcessGroup | None,
) -> tuple[int, dict[str, Any] | None]:
    """Fill the masters, the optimizer's state and what is whole; its step and extra."""
    rank, _ = rank_and_size(group)
    pieces = pieces_of(buckets, rank)
    with raising_everywhere(ValueError, group=group):
        places, whole = find_places(pieces, module, rank), find_whole(buckets, module)
    made: resume.States = {}

    def make_states(saved: resume.Saved) -> resume.States:
        for bucket, parts in pieces.items():
            of_parts = [saved.get(places[piece][0], {}) for piece in parts]
            made.update(make_state(bucket, parts, of_parts, optimizer, rank))
        return made

    result = resume.load(path, places, whole, make_states, optimizer, group)
    take_numbers(pieces, made, optimizer)
    return result


def pieces_of(buckets: list[Bucket], rank: int) -> Pieces:
    return {b: b.layout.pieces(b.master.detach(), rank) for b in buckets}


def find_places(
    pieces: Pieces, module: nn.Module, rank: int
) -> dict[Tensor, resume.Place]:
    """Every local piece with the name, shape and first element of its parameter."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    missing = sum(p not in names for bucket in pieces for p in bucket.parameters)
    if missing:
        raise ValueError(f"{missing} parameters of the optimizer are not of module")
    places: dict[Tensor, resume.Place] = {}
    for bucket, parts in pieces.items():
        layout = bucket.layout
        for piece, slot, parameter in zip(
            parts, layout.slots, bucket.parameters, strict=True
        ):
            start, _ = layout.piece_bounds(slot, rank)
            places[piece] = (names[parameter], tuple(slot.shape), start)
    return places


def find_whole(buckets: list[Bucket], module: nn.Module) -> dict[str, Tensor]:
    """What every rank has in full: frozen parameters and buffers."""
    sharded = {p for bucket in buckets for p in bucket.parameters}
    others = {n: p for n, p in module.named_parameters() if p not in sharded}
    return {**others, **resume.persistent_buffers(module)}


def cut_states(pieces: Pieces, optimizer: Optimizer, rank: int) -> resume.States:
    """The optimizer's state of each piece: what is as long as the shard is cut."""
    states: resume.States = {}
    for bucket, parts in pieces.items():
        state = optimizer.state.get(bucket.master, {})
        for number, piece in enumerate(parts):
            states[piece] = {
                key: bucket.layout.pieces(value, rank)[number]
                if value.shape == bucket.master.shape
                else value
                for key, value in state.items()
            }
    return states


def make_state(
    bucket: Bucket,
    parts: list[Tensor],
    saved: list[dict[str, resume.Kind]],
    optimizer: Optimizer,
    rank: int,
) -> resume.States:
    """State for a bucket, cut into that of its pieces; zero where none was saved."""
    kinds: dict[str, resume.Kind] = {}
    for kinds_of_piece in saved:
        kinds |= kinds_of_piece
    if not kinds:
        optimizer.state.pop(bucket.master, None)
        return {piece: {} for piece in parts}
    on_device = resume.wants_numbers_on_device(optimizer)
    state = resume.empty_state(bucket.master, kinds, on_device)
    optimizer.state[bucket.master] = state
    return {
        piece: {
            key: bucket.layout.pieces(state[key], rank)[number]
            if kinds[key].cut
            else state[key].clone()
            for key in saved[number]
        }
        for number, piece in enumerate(parts)
    }


def take_numbers(pieces: Pieces, made: resume.States, optimizer: Optimizer) -> None:
    """A bucket steps as one: it has the largest of its parameters' step counts."""
    for bucket, parts in pieces.items():
        for key, value in optimizer.state.get(bucket.master, {}).items():
            if value.dim() == 0:
                found = [made[p][key] for p in parts if key in made[p]]
                value.copy_(torch.stack(found).max())
