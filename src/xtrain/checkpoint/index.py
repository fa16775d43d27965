"""What a checkpoint has of which tensor: pieces, and the index that lists them.

    index.json   format, step, world_size, extra
                 tensors   name -> shape, dtype, pieces [start, stop, file, checksum]
                 files     name -> bytes
                 checksum  of all of this

A piece is a range of a flattened tensor. An index is believed when its checksum is
right and nothing in it can be misread: every number in range, every file one of the
checkpoint's own, every element of every tensor in some piece.
"""

import json
import math
import re
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORMAT = 1
FILE_NAME = re.compile(r"rank-[0-9]{5,}\.safetensors")


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, incomplete or of another model."""


class CheckpointReplaced(CheckpointError):
    """A checkpoint that was deleted or replaced while it was read: load again."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `start + data.numel()` of the flattened tensor `name`."""

    name: str
    shape: tuple[int, ...]
    start: int
    data: Tensor


class Stored(NamedTuple):
    """A piece in a file of a checkpoint."""

    file: str
    name: str
    start: int
    stop: int
    checksum: int

    @property
    def key(self) -> str:
        """Its name in the file."""
        return f"{self.name}@{self.start}"


class About(NamedTuple):
    """What must be the same here and in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


# -- writing


def make_index(step: int, extra: Any, manifests: list[list[dict]]) -> dict[str, Any]:
    """Merge the ranks' manifests; CheckpointError unless they cover every tensor."""
    tensors: dict[str, dict[str, Any]] = {}
    files: dict[str, int] = {}
    for entry in (entry for manifest in manifests for entry in manifest):
        if "name" not in entry:
            files[entry["file"]] = entry["bytes"]
            continue
        about = {"shape": entry["shape"], "dtype": entry["dtype"], "pieces": []}
        tensor = tensors.setdefault(entry["name"], about)
        for key in ("shape", "dtype"):
            if tensor[key] != entry[key]:
                raise CheckpointError(
                    f"{entry['name']}: {key} {tensor[key]} and {entry[key]} on "
                    "different ranks"
                )
        tensor["pieces"].append(
            [entry["start"], entry["stop"], entry["file"], entry["checksum"]]
        )
    index = {
        "format": FORMAT,
        "step": step,
        "world_size": len(manifests),
        "extra": extra,
        "tensors": tensors,
        "files": files,
    }
    check_structure(index)
    index = json.loads(json.dumps(index))  # as a reader will see it
    return {**index, "checksum": checksum_of(index)}


def checksum_of(index: dict[str, Any]) -> int:
    """Of an index without its checksum."""
    rest = {key: value for key, value in index.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def crc(data: Tensor) -> int:
    return zlib.crc32(data.contiguous().view(torch.uint8).numpy().data)


# -- reading


def parse_index(text: bytes, path: Path) -> dict[str, Any]:
    """The index that a file's bytes are; CheckpointError unless it can be believed."""
    try:
        index = json.loads(text)
        found = index.get("format") if isinstance(index, dict) else None
        if found != FORMAT:
            raise CheckpointError(f"{path} has format {found}, this reads {FORMAT}")
        if index.get("checksum") != checksum_of(index):
            raise CheckpointError(f"{path} is damaged: it does not match its checksum")
    except (ValueError, RecursionError) as error:  # no text, no JSON, or a bottomless
        raise CheckpointError(f"{path} is damaged: {error}") from None
    try:
        check_structure(index)
    except (CheckpointError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return index


def check_structure(index: dict[str, Any]) -> None:
    """CheckpointError unless an index has everything, of the right types, in range."""
    files: Any = index.get("files")
    tensors: Any = index.get("tensors")
    require(is_count(index.get("step")), "its step is no number from 0 on")
    require(is_count(index.get("world_size")), "its world size is no number")
    require("extra" in index, "it has no extra")
    require(isinstance(files, dict), "it has no files")
    require(isinstance(tensors, dict), "it has no tensors")
    for name, nbytes in files.items():
        require(FILE_NAME.fullmatch(name), f"{name!r} is no name of a file of its own")
        require(is_count(nbytes), f"the size of {name} is no number")
    for name, entry in tensors.items():
        name.encode()  # half a character is no name
        require(isinstance(entry, dict), f"{name} is no tensor")
        check_tensor(name, entry, files)


def check_tensor(name: str, entry: dict[str, Any], files: dict[str, int]) -> None:
    """CheckpointError unless a tensor's pieces cover it, and lie in known files."""
    shape: Any = entry.get("shape")
    pieces: Any = entry.get("pieces")
    require(
        isinstance(shape, list) and all(map(is_count, shape)), f"{name} has no shape"
    )
    require(dtype_named(entry.get("dtype")), f"{name} has no dtype that torch knows")
    require(isinstance(pieces, list), f"{name} has no list of pieces")
    numel = math.prod(shape)
    for piece in pieces:
        require(isinstance(piece, list) and len(piece) == 4, f"{name}: no piece")
        start, stop, file, checksum = piece
        require(
            is_count(start) and is_count(stop) and start < stop <= numel,
            f"{name}: elements {start} to {stop} of {numel}",
        )
        require(isinstance(file, str) and file in files, f"{name}: no file {file!r}")
        require(
            is_count(checksum) and checksum < 2**32, f"{name}: a piece has no checksum"
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


def dtype_named(name: Any) -> torch.dtype | None:
    """torch's dtype of that name; None if there is none."""
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None


def compare(here: dict[str, About], there: dict[str, About]) -> str:
    """A line for each tensor that only one side has, or that cannot be the same.

    Values are converted between floating-point dtypes, rounded to the nearest; any
    other change of dtype would lose what they mean, and is a problem.
    """
    lines = []
    for name in sorted({*here, *there}):
        mine, stored = here.get(name), there.get(name)
        if stored is None:
            shape = list(mine.shape if mine else ())
            lines.append(f"{name}: not in the checkpoint, {shape} here")
        elif mine is None:
            lines.append(f"{name}: {list(stored.shape)} in the checkpoint, not here")
        elif mine.shape != stored.shape:
            shapes = f"{list(stored.shape)} in the checkpoint, {list(mine.shape)} here"
            lines.append(f"{name}: {shapes}")
        elif not converts(stored.dtype, mine.dtype):
            both = f"{stored.dtype} in the checkpoint, {mine.dtype} here"
            lines.append(f"{name}: {both}")
    return "".join(f"\n  {line}" for line in lines)


def converts(stored: torch.dtype, mine: torch.dtype) -> bool:
    return stored == mine or (stored.is_floating_point and mine.is_floating_point)
