"""The files of a checkpoint in Hugging Face's layout, and what they hold."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import About, CheckpointError
from xtrain.checkpoint.bare_file import opened_safetensors
from xtrain.checkpoint.locks import open_file
from xtrain.comm.agreement import raising_everywhere

Files = dict[Path, set[str]]
MOST_BYTES = 2**28
"""Of a JSON file: an index of a million tensors has 100 MB."""
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
CONFIG, GENERATION = "config.json", "generation_config.json"
DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
}
"""Their names in the header of a safetensors file."""


def files_of(directory: Path) -> Files:
    """Each file of a checkpoint with the names of its tensors that count."""
    if (directory / INDEX).exists():
        files: Files = {}
        weight_map = read_json(directory / INDEX).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{directory / INDEX} has no weight_map")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(
                    f"{INDEX}: {file!r} is not a file of the directory"
                )
            files.setdefault(directory / file, set()).add(name)
        return files
    with opened_safetensors(directory / FILE) as opened:
        return {directory / FILE: set(opened.keys())}


def only_dtype(there: dict[str, About]) -> torch.dtype:
    """The dtype of all tensors."""
    dtypes = {about.dtype for about in there.values()}
    if len(dtypes) > 1:
        names = ", ".join(sorted(map(str, dtypes)))
        raise CheckpointError(f"tensors of {names} in one checkpoint: pass dtype")
    return dtypes.pop()


@contextmanager
def as_checkpoint_error() -> Iterator[None]:
    """An OSError or ValueError inside becomes a CheckpointError."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error


@contextmanager
def named(path: Path) -> Iterator[None]:
    """A ValueError inside becomes a CheckpointError that begins with the file."""
    try:
        yield
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_json(path: Path) -> dict:
    """The object in a file; CheckpointError if there is none."""
    try:
        with open(open_file(path), "rb") as file:
            text = file.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise ValueError(f"it has more than {MOST_BYTES} bytes")
        found = json.loads(text)
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read: nested too deeply") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return found


def write_json(path: Path, values: dict) -> None:
    """Indented."""
    path.write_text(json.dumps(values, indent=2) + "\n")


def write_safetensors(
    path: Path,
    about: Mapping[str, About],
    tensors: Iterable[Tensor],
    metadata: Mapping[str, str],
) -> None:
    """Write tensors in the order of `about`, each before the next one is made.

    The format: the length of the header, 8 bytes, the header as JSON, padded to a
    multiple of 8 bytes, and the tensors' bytes end to end. `save_file` of safetensors
    needs all tensors at once.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, (shape, dtype, _) in about.items():
        begin, end = end, end + torch.Size(shape).numel() * dtype.itemsize
        entry = {"dtype": DTYPES[dtype], "shape": shape, "data_offsets": (begin, end)}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.reshape(-1).view(torch.uint8).numpy().data)
            del tensor  # before the next one is made
        file.flush()
        os.fsync(file.fileno())


def everywhere(mesh: DeviceMesh | None) -> AbstractContextManager:
    """What one rank raises, all raise as a CheckpointError."""
    if mesh is None:
        return as_checkpoint_error()
    return raising_everywhere(CheckpointError, group=None)
