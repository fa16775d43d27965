"""Read a bare model's safetensors file, as any library writes it, into shards."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from xtrain.checkpoint.index import About, CheckpointError, Piece, compare

Wanted = list[tuple[Piece, set[str]]]  # each with all names the file may have it under


@torch.no_grad()
def read_safetensors(path: str | Path, wanted: Wanted) -> None:
    """Fill pieces from a file, reading their ranges only.

    Floating-point values are converted to the pieces' dtype, rounded to the nearest;
    any other difference of dtype, a name or a shape is a CheckpointError.
    """
    with opened_safetensors(path) as opened:
        found = match_names(path, opened, wanted)
        for piece, _ in wanted:
            if piece.data.numel():
                read_range(opened, found[piece.name], piece)


def check_safetensors(path: str | Path, wanted: Wanted) -> None:
    """CheckpointError unless the file has just what is wanted; only looks."""
    with opened_safetensors(path) as opened:
        match_names(path, opened, wanted)


@contextmanager
def opened_safetensors(path: str | Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework="pt") as opened:
            yield opened
    except CheckpointError:
        raise
    except Exception as error:  # whatever a damaged header leads to
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def match_names(path: str | Path, opened: Any, wanted: Wanted) -> dict[str, str]:
    """The name in the file of each piece: of tied tensors a file often has one."""
    there = {name: about(opened, name) for name in opened.keys()}  # noqa: SIM118
    needed, found = {}, {}
    for piece, names in wanted:
        found[piece.name] = next((n for n in sorted(names) if n in there), "")
        kind = About(tuple(piece.shape), piece.data.dtype)
        needed[found[piece.name] or piece.name] = kind
    known = set().union(*(names for _, names in wanted))
    spare = {n for n in there if n in known and n not in needed}
    problems = compare(needed, {n: a for n, a in there.items() if n not in spare})
    if problems:
        raise CheckpointError(f"{path} is of another model:{problems}")
    return found


def about(opened: Any, name: str) -> About:
    """Shape and dtype of a tensor in a file; its elements stay there."""
    part = opened.get_slice(name)
    shape = tuple(part.get_shape())
    empty = part[:0] if shape else opened.get_tensor(name)
    return About(shape, empty.dtype)


def read_range(opened: Any, name: str, piece: Piece) -> None:
    """Read a piece's elements, and of a matrix the rest of its first and last row."""
    if not piece.shape:
        piece.data.copy_(opened.get_tensor(name).view(1))
        return
    stop = piece.start + piece.data.numel()
    row = torch.Size(piece.shape[1:]).numel()
    first, last = piece.start // row, -(-stop // row)
    rows = opened.get_slice(name)[first:last].reshape(-1)
    piece.data.copy_(rows[piece.start - first * row : stop - first * row])
