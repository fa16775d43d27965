"""Sharded checkpoints: each rank writes its own pieces, any number of ranks reads them.

    run/
      latest                        the name of the newest complete checkpoint
      step-00000020/
        index.json                  every tensor: shape, dtype, which piece lies where
        rank-00000.safetensors      this rank's pieces
        rank-00001.safetensors

A piece is a box of a tensor (`boxes`). A rank that loads asks for the boxes it needs
and reads only the pieces that overlap them, so the world size and the way to shard may
change, and no rank ever holds a whole model. What several ranks hold, one writes.

A checkpoint is written beside its place, checked, and moved there in one step: a run
that dies while saving leaves the one before untouched, and other jobs may save to the
same folder (`folder`). Every piece has a checksum, and all are looked at before the
first byte of a live model changes (`reader`).
"""

import os
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.checkpoint.boxes import Box
from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.folder import discard, prepare, publish
from xtrain.checkpoint.index import crc, make_index
from xtrain.checkpoint.pieces import Piece
from xtrain.checkpoint.structure import key_of
from xtrain.comm.agreement import (
    place_in,
    raising_everywhere,
    value_of_rank_0,
    values_of_all,
)


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
    rank, _ = place_in(group)
    check_step(step, group)
    failed = f"step {step} was not saved in {directory}: "
    partial = final = None
    try:
        with raising_everywhere(CheckpointError, group=group, what=failed):
            boxes = [(p.name, p.box) for p in pieces]
            if rank == 0:
                partial = prepare(Path(directory), step)
        folder = value_of_rank_0(partial and partial.path, group)
        is_first = first_copies(boxes, group)
        manifest = None
        with raising_everywhere(CheckpointError, group=group, what=failed):
            path = folder / f"rank-{rank:05d}.safetensors"
            manifest = write_file(path, pieces, is_first)
        manifests = values_of_all(manifest, group)
        with raising_everywhere(CheckpointError, group=group, what=failed):
            if partial is not None:
                final = publish(partial, make_index(step, extra, manifests))
    except CheckpointError:  # on every rank, so none writes any more
        if partial is not None:
            discard(partial)
        raise
    finally:
        if partial is not None:
            partial.release()
    return value_of_rank_0(final, group)


def first_copies(
    boxes: list[tuple[str, Box]], group: ProcessGroup | None
) -> list[bool]:
    """For each of this rank's boxes whether no rank before it has the same one."""
    before = values_of_all(boxes, group)[: place_in(group)[0]]
    seen = {box for others in before for box in others}
    first = []
    for box in boxes:
        first.append(box not in seen)
        seen.add(box)
    return first


def check_step(step: int, group: ProcessGroup | None) -> None:
    """ValueError on every rank unless all save the same step, 0 or more."""
    steps = values_of_all(step, group)
    for rank, other in enumerate(steps):
        number = isinstance(other, int) and not isinstance(other, bool)
        if not number or other < 0 or other != steps[0]:
            raise ValueError(
                f"step={other!r} on rank {rank}, {steps[0]!r} on rank 0: it must be "
                "the same integer on every rank, not below 0"
            )


def write_file(
    path: Path, pieces: list[Piece], is_first: list[bool] | None = None
) -> list[dict[str, Any]]:
    """Write one rank's pieces; what the index must know of them.

    Pieces that are not the first of their box are in another file, or in this one
    already: the index only compares their checksum. CheckpointError if it fails.
    """
    tensors: dict[str, Tensor] = {}
    manifest: list[dict[str, Any]] = []
    for piece, first in zip(pieces, is_first or [True] * len(pieces), strict=True):
        data = piece.data.detach().cpu().contiguous()
        if data.numel() == 0:
            continue
        if first:
            tensors[key_of(piece.name, piece.offset)] = data.clone()
        manifest.append(
            {
                "name": piece.name,
                "shape": list(piece.shape),
                "dtype": str(data.dtype).removeprefix("torch."),
                "offset": list(piece.offset),
                "size": list(data.shape),
                "file": path.name if first else None,
                "checksum": crc(data),
            }
        )
    try:
        save_file(tensors, path)
        with open(path, "rb") as file:
            os.fsync(file.fileno())
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be written: {error}") from error
    manifest.append({"file": path.name, "bytes": path.stat().st_size})
    return manifest
