"""What an index must look like: every number in range, every element in a piece.

A checksum finds damage. It does not stop a person who writes an index on purpose, so
nothing in one is used before it was checked here.
"""

import math
import re
from typing import Any, NamedTuple

import torch

from xtrain.checkpoint.boxes import Box, boxes_of_range, covering_problem
from xtrain.checkpoint.errors import CheckpointError

FILE_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors")


class Stored(NamedTuple):
    """A tensor in a file of a checkpoint: the elements of some boxes, end to end."""

    file: str
    name: str
    key: str  # its name in the file
    shape: tuple[int, ...]  # its shape in the file
    checksum: int
    boxes: tuple[Box, ...]

    @property
    def where(self) -> str:
        return f"from {list(self.boxes[0].offset)} to {list(self.boxes[-1].end)}"


def key_of(name: str, offset: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, offset))}"


def stored_pieces(index: dict[str, Any], name: str) -> list[Stored]:
    """The pieces of a tensor, whose entry has been checked."""
    shape = tuple(index["tensors"][name]["shape"])
    found = []
    for first, second, file, checksum in index["tensors"][name]["pieces"]:
        if index["format"] == 1:
            boxes = tuple(boxes_of_range(shape, first, second))
            key, numel = f"{name}@{first}", second - first
            found.append(Stored(file, name, key, (numel,), checksum, boxes))
        else:
            box = Box(tuple(first), tuple(second))
            key = key_of(name, box.offset)
            found.append(Stored(file, name, key, box.size, checksum, (box,)))
    return found


def check_structure(index: dict[str, Any]) -> None:
    """CheckpointError unless an index has everything, of the right types, in range."""
    files: Any = index.get("files")
    tensors: Any = index.get("tensors")
    require(is_count(index.get("step")), "its step is not a number from 0 on")
    require(is_count(index.get("world_size")), "its world size is not a number")
    require("extra" in index, "it has no extra")
    require(isinstance(files, dict), "it has no files")
    require(isinstance(tensors, dict), "it has no tensors")
    for name, nbytes in files.items():
        require(
            FILE_NAME.fullmatch(name),
            f"{name!r} is not the name of a file in its folder",
        )
        require(is_count(nbytes), f"the size of {name} is not a number")
    for name, entry in tensors.items():
        name.encode()  # half a character is not a name
        require(isinstance(entry, dict), f"{name} is not a tensor")
        check_tensor(name, entry, files)
        if index["format"] == 1:
            check_ranges(name, entry["shape"], entry["pieces"])
        else:
            check_boxes(name, entry["shape"], entry["pieces"])


def check_tensor(name: str, entry: dict[str, Any], files: dict[str, int]) -> None:
    """CheckpointError unless a tensor's pieces lie in known files."""
    shape: Any = entry.get("shape")
    pieces: Any = entry.get("pieces")
    require(is_counts(shape), f"{name} has no shape")
    require(dtype_named(entry.get("dtype")), f"{name} has no dtype that torch knows")
    require(isinstance(pieces, list), f"{name} has no list of pieces")
    for piece in pieces:
        require(isinstance(piece, list) and len(piece) == 4, f"{name}: no piece")
        *_, file, checksum = piece
        require(isinstance(file, str) and file in files, f"{name}: no file {file!r}")
        require(
            is_count(checksum) and checksum < 2**32, f"{name}: a piece has no checksum"
        )


def check_boxes(name: str, shape: list[int], pieces: list[list]) -> None:
    """CheckpointError unless the pieces' boxes have each element once."""
    boxes = []
    for offset, size, *_ in pieces:
        where = f"{name}: a piece of size {size} at {offset}"
        require(is_counts(offset) and is_counts(size), f"{where}: no numbers")
        require(len(offset) == len(size) == len(shape), f"{where} of {len(shape)} dims")
        ends = zip(offset, size, shape, strict=True)
        require(all(o < o + s <= n for o, s, n in ends), f"{where} of {shape}")
        boxes.append(Box(tuple(offset), tuple(size)))
    problem = covering_problem(tuple(shape), boxes)
    require(problem is None, f"{name}: {problem}")


def check_ranges(name: str, shape: list[int], pieces: list[list]) -> None:
    """CheckpointError unless the ranges of format 1 cover the tensor."""
    numel = math.prod(shape)
    for start, stop, *_ in pieces:
        require(
            is_count(start) and is_count(stop) and start < stop <= numel,
            f"{name}: elements {start} to {stop} of {numel}",
        )
    end = 0
    for start, stop, *_ in sorted(pieces):
        require(start <= end, f"{name}: elements {end} to {start} are missing")
        end = max(end, stop)
    require(end == numel, f"{name}: elements from {end} on are missing")


def require(condition: Any, problem: str) -> None:
    if not condition:
        raise CheckpointError(problem)


def is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(is_count, value))


def dtype_named(name: Any) -> torch.dtype | None:
    """torch's dtype of that name; None if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None
