"""Read a bare model's safetensors file, as any library writes it, into shards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from xtrain.checkpoint.boxes import Box
from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.index import compare
from xtrain.checkpoint.locks import open_file
from xtrain.checkpoint.pieces import About, Shard

Wanted = list[tuple[Shard, set[str]]]  # each with all names the file may have it under


@torch.no_grad()
def read_safetensors(path: str | Path, wanted: Wanted) -> None:
    """Fill shards from a file, reading their elements only.

    Floating-point values are converted to the shards' dtype, rounded to the nearest;
    any other difference of dtype, name or shape is a CheckpointError.
    """
    with opened_safetensors(path) as opened:
        found = match_names(path, opened, wanted)
        for shard, _ in wanted:
            for piece in shard.pieces():
                piece.data.copy_(read_box(opened, found[shard.name], piece.box))


def check_safetensors(path: str | Path, wanted: Wanted) -> None:
    """CheckpointError unless the file has just what is wanted; only looks."""
    with opened_safetensors(path) as opened:
        match_names(path, opened, wanted)


@contextmanager
def opened_safetensors(path: str | Path) -> Iterator[Any]:
    try:
        os.close(open_file(Path(path)))  # opening a pipe would block
        with safe_open(path, framework="pt") as opened:
            yield opened
    except CheckpointError:
        raise
    except Exception as error:  # a damaged header raises many kinds
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def match_names(path: str | Path, opened: Any, wanted: Wanted) -> dict[str, str]:
    """The name in the file of each shard: of tied tensors a file often has one."""
    there = {name: about(opened, name) for name in opened.keys()}  # noqa: SIM118
    needed, found = {}, {}
    for shard, names in wanted:
        found[shard.name] = next((n for n in sorted(names) if n in there), "")
        needed[found[shard.name] or shard.name] = shard.about
    known = set().union(*(names for _, names in wanted))
    spare = {n for n in there if n in known and n not in needed}
    problems = compare(needed, {n: a for n, a in there.items() if n not in spare})
    if problems:
        raise CheckpointError(f"{path} is of another model:{problems}")
    return found


def about(opened: Any, name: str) -> About:
    """Shape and dtype of a tensor in a file, without reading its elements."""
    part = opened.get_slice(name)
    shape = tuple(part.get_shape())
    empty = part[:0] if shape else opened.get_tensor(name)
    return About(shape, empty.dtype)


def read_box(opened: Any, name: str, box: Box) -> Tensor:
    """Read the elements of a box alone."""
    ranges = zip(box.offset, box.end, strict=True)
    places = tuple(slice(low, end) for low, end in ranges)
    with torch.device("cpu"):  # safetensors would put a slice on the default device
        return opened.get_slice(name)[places] if places else opened.get_tensor(name)
