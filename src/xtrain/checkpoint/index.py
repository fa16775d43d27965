"""The index of a checkpoint, which lists the pieces of every tensor.

    index.json   format, step, world_size, extra
                 tensors   name -> shape, dtype, pieces [offset, size, file, checksum]
                 files     name -> bytes
                 checksum  of all of this

An index is believed when its checksum is right and nothing in it can be misread
(`structure`). In format 1, which is still read, a piece was a range of the flattened
tensor: [start, stop, file, checksum].
"""

import json
import zlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.pieces import About
from xtrain.checkpoint.structure import check_structure

FORMAT = 2
KNOWN = (1, FORMAT)


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
        if entry["file"] is not None:
            tensor["pieces"].append(
                [entry["offset"], entry["size"], entry["file"], entry["checksum"]]
            )
    check_copies(manifests)
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


def check_copies(manifests: list[list[dict]]) -> None:
    """CheckpointError unless ranks that hold the same piece hold the same values."""
    first: dict[tuple, tuple[int, int]] = {}
    for rank, manifest in enumerate(manifests):
        for entry in (entry for entry in manifest if "name" in entry):
            offset, size = entry["offset"], entry["size"]
            key = (entry["name"], *offset, *size)
            writer, checksum = first.setdefault(key, (rank, entry["checksum"]))
            if checksum != entry["checksum"]:
                raise CheckpointError(
                    f"{entry['name']}: ranks {writer} and {rank} hold different values "
                    f"of the piece of size {size} at {offset}"
                )


def checksum_of(index: dict[str, Any]) -> int:
    """Of an index without its checksum."""
    rest = {key: value for key, value in index.items() if key != "checksum"}
    return zlib.crc32(json.dumps(rest, sort_keys=True).encode())


def crc(data: Tensor) -> int:
    flat = data.contiguous().reshape(-1)  # what has no dim cannot be viewed as bytes
    return zlib.crc32(flat.view(torch.uint8).numpy().data)


def parse_index(text: bytes, path: Path) -> dict[str, Any]:
    """The index that a file's bytes are; CheckpointError unless it can be believed."""
    try:
        index = json.loads(text)
        found = index.get("format") if isinstance(index, dict) else None
        if type(found) is not int or found not in KNOWN:
            raise CheckpointError(
                f"{path} has format {found}, this reads {' and '.join(map(str, KNOWN))}"
            )
        if index.get("checksum") != checksum_of(index):
            raise CheckpointError(f"{path} is damaged: it does not match its checksum")
    except (ValueError, RecursionError) as error:  # no text, no JSON, or a bottomless
        raise CheckpointError(f"{path} is damaged: {error}") from None
    try:
        check_structure(index)
    except (CheckpointError, UnicodeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
    return index


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
        elif stored.shape not in (mine.shape, mine.padded):
            shapes = f"{list(stored.shape)} in the checkpoint, {list(mine.shape)} here"
            lines.append(f"{name}: {shapes}")
        elif not converts(stored.dtype, mine.dtype):
            both = f"{stored.dtype} in the checkpoint, {mine.dtype} here"
            lines.append(f"{name}: {both}")
    return "".join(f"\n  {line}" for line in lines)


def converts(stored: torch.dtype, mine: torch.dtype) -> bool:
    return stored == mine or (stored.is_floating_point and mine.is_floating_point)
