"""Sharded checkpoints: each rank writes its own pieces, any number of ranks reads them.

    run/
      latest                        the name of the newest complete checkpoint
      step-00000020/
        index.json                  every tensor: shape, dtype, which piece lies where
        rank-00000.safetensors      this rank's pieces, flat
        rank-00001.safetensors

A piece is a range of a flattened tensor. A rank that loads asks for the ranges it needs
and reads only the pieces that overlap them, so the world size may change, and nobody
ever holds a whole model.

A checkpoint is written beside its place, checked, and moved there in one step: a run
that dies while saving leaves the one before untouched, and other jobs may save to the
same folder (`checkpoint_folder`). Every piece has a checksum, and all are looked at
before the first byte of a live model changes (`checkpoint_reader`).
"""

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.agreement import raising_everywhere
from xtrain.comm.checks import rank_and_size
from xtrain.zero.bare_file import check_safetensors, read_safetensors
from xtrain.zero.checkpoint_folder import discard, latest, prepare, publish
from xtrain.zero.checkpoint_index import (
    CheckpointError,
    CheckpointReplaced,
    Piece,
    Stored,
    crc,
    make_index,
)
from xtrain.zero.checkpoint_reader import CheckpointReader

__all__ = [
    "CheckpointError",
    "CheckpointReader",
    "CheckpointReplaced",
    "Piece",
    "Stored",
    "check_safetensors",
    "latest",
    "read_safetensors",
    "save_pieces",
]


def save_pieces(
    directory: str | Path,
    step: int,
    pieces: list[Piece],
    extra: dict[str, Any] | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint from every rank's pieces; its path, on every rank.

    Together the ranks' pieces must cover every tensor. `directory` is rank 0's, and
    `extra`, any JSON value, too. A failure on one rank raises on all.
    """
    rank, size = rank_and_size(group)
    check_step(step, group)
    failed = f"step {step} was not saved in {directory}: "
    partial = final = None
    try:
        with raising_everywhere(CheckpointError, group=group, what=failed):
            if rank == 0:
                partial = prepare(Path(directory), step)
        folder = agree(partial and partial.path, group)
        manifest = None
        with raising_everywhere(CheckpointError, group=group, what=failed):
            manifest = write_file(folder / f"rank-{rank:05d}.safetensors", pieces)
        manifests: list[Any] = [None] * size
        dist.all_gather_object(manifests, manifest, group=group)
        with raising_everywhere(CheckpointError, group=group, what=failed):
            if partial is not None:
                final = publish(partial, make_index(step, extra, manifests))
    except CheckpointError:  # on every rank, so nobody writes any more
        if partial is not None:
            discard(partial)
        raise
    finally:
        if partial is not None:
            partial.release()
    return agree(final, group)


def check_step(step: int, group: ProcessGroup | None) -> None:
    """ValueError on every rank unless all save the same step, 0 or more."""
    steps: list[Any] = [None] * rank_and_size(group)[1]
    dist.all_gather_object(steps, step, group=group)
    for rank, other in enumerate(steps):
        number = isinstance(other, int) and not isinstance(other, bool)
        if not number or other < 0 or other != steps[0]:
            raise ValueError(
                f"step={other!r} on rank {rank}, {steps[0]!r} on rank 0: it must be "
                "the same integer on every rank, not below 0"
            )


def write_file(path: Path, pieces: list[Piece]) -> list[dict[str, Any]]:
    """Write one rank's pieces; what the index must know of them."""
    tensors: dict[str, Tensor] = {}
    manifest: list[dict[str, Any]] = []
    for piece in pieces:
        data = piece.data.detach().cpu().contiguous()
        if data.numel() == 0:
            continue
        tensors[f"{piece.name}@{piece.start}"] = data.clone()
        manifest.append(
            {
                "name": piece.name,
                "shape": list(piece.shape),
                "dtype": str(data.dtype).removeprefix("torch."),
                "start": piece.start,
                "stop": piece.start + data.numel(),
                "file": path.name,
                "checksum": crc(data),
            }
        )
    save_file(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    manifest.append({"file": path.name, "bytes": path.stat().st_size})
    return manifest


def agree(value: Any, group: ProcessGroup | None) -> Any:
    """Rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]
