"""A sharded model and its optimizer as the pieces of a checkpoint, and back."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.comm.checks import rank_and_size
from xtrain.zero.checkpoint import CheckpointReader, Piece, save_pieces

Place = tuple[str, tuple[int, ...], int]  # name, full shape, first element held here


def save(
    directory: str | Path,
    step: int,
    places: dict[Tensor, Place],
    whole: dict[str, Tensor],
    optimizer: Optimizer | None,
    extra: dict[str, Any] | None,
    group: ProcessGroup | None,
) -> Path:
    """Save local pieces, replicated tensors, optimizer state and this rank's RNG.

    Args:
        places: each local piece (flat) with where it belongs.
        whole: tensors that every rank has whole (buffers); rank 0 writes them.
    """
    rank, size = rank_and_size(group)
    pieces = [Piece(*place, data=piece) for piece, place in places.items()]
    if rank == 0:
        pieces += [Piece(n, tuple(t.shape), 0, t.reshape(-1)) for n, t in whole.items()]
    if optimizer is not None:
        pieces += state_pieces(places, optimizer)
    rng = torch.get_rng_state()
    pieces.append(Piece(f"rng.{rank}", tuple(rng.shape), 0, rng))
    about = {"user": extra, "ranks": size, "groups": group_options(optimizer)}
    return save_pieces(directory, step, pieces, about, group)


def load(
    path: str | Path,
    places: dict[Tensor, Place],
    whole: dict[str, Tensor],
    optimizer: Optimizer | None,
    group: ProcessGroup | None,
) -> tuple[int, dict[str, Any] | None]:
    """Fill everything from a checkpoint of any world size; its step and extra."""
    rank, size = rank_and_size(group)
    reader = CheckpointReader(path)
    wanted = [Piece(*place, data=piece.detach()) for piece, place in places.items()]
    buffers = {n: t.detach().reshape(-1).clone() for n, t in whole.items()}
    wanted += [Piece(n, tuple(whole[n].shape), 0, t) for n, t in buffers.items()]
    reader.check(wanted)
    if optimizer is not None:
        create_state(reader, places, optimizer)
        wanted += state_pieces(places, optimizer)
        for mine, saved in zip(
            optimizer.param_groups, reader.extra["groups"], strict=True
        ):
            mine.update(saved)
    if reader.extra["ranks"] == size:  # other ranks would draw other numbers anyway
        rng = torch.get_rng_state()
        wanted.append(Piece(f"rng.{rank}", tuple(rng.shape), 0, rng))
    reader.read(wanted)
    for name, flat in buffers.items():
        whole[name].copy_(flat.view(whole[name].shape))
    if reader.extra["ranks"] == size:
        torch.set_rng_state(rng)
    return reader.step, reader.extra["user"]


def state_pieces(places: dict[Tensor, Place], optimizer: Optimizer) -> list[Piece]:
    """The optimizer's state of each piece: cut as it is cut, or one number a piece."""
    pieces = []
    for parameter, (name, shape, start) in places.items():
        for key, value in optimizer.state.get(parameter, {}).items():
            label = f"optimizer.{key}.{name}"
            if value.shape == parameter.shape and value.dim() == 1:
                pieces.append(Piece(label, shape, start, value))
            elif parameter.numel() > 0:
                pieces.append(Piece(label, (), 0, value.view(1)))
    return pieces


def create_state(
    reader: CheckpointReader, places: dict[Tensor, Place], optimizer: Optimizer
) -> None:
    """Make the state that the checkpoint has for each piece, still to be filled."""
    for parameter, (name, shape, _) in places.items():
        state: dict[str, Tensor] = {}
        for label, entry in reader.tensors.items():
            prefix, _, rest = label.partition(".")
            key, _, owner = rest.partition(".")
            if prefix != "optimizer" or owner != name:
                continue
            dtype = getattr(torch, entry["dtype"])
            if tuple(entry["shape"]) == shape:
                state[key] = torch.zeros_like(parameter, dtype=dtype)
            else:
                state[key] = torch.zeros((), dtype=dtype)
        if state:
            optimizer.state[parameter] = state


def group_options(optimizer: Optimizer | None) -> list[dict[str, Any]]:
    if optimizer is None:
        return []
    return [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
