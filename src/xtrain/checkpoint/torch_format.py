"""To torch's distributed checkpoint, and from it; one process, without ranks.

    here                      there
    layers.0...weight         model.layers.0...weight
    :cut:exp_avg:NAME         optimizer.state.NAME.exp_avg
    :number:step:NAME         optimizer.state.NAME.step
    :random:cpu:3             random.cpu.3
    step, extra, groups       xtrain, as JSON

So `dcp.load({"model": model.state_dict()})` of a program of torch's reads the weights,
and what it saved as {"model": ...} is read here, in any layout. Tensors are whole in
memory while they are converted.
"""

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.files import save_pieces
from xtrain.checkpoint.pieces import Piece
from xtrain.checkpoint.reader import open_newest

ABOUT = "xtrain"
"""The entry with what is no tensor."""


def export_torch(path: str | Path, directory: str | Path) -> None:
    """Write a checkpoint, or a run's newest, as a checkpoint of torch's.

    CheckpointError if it is damaged.
    """
    reader, _ = open_newest(path)
    state: dict[str, Any] = {}
    with reader:
        for name in reader.tensors:
            about = reader.about(name)
            data = torch.empty(about.shape, dtype=about.dtype, device="cpu")
            reader.read([whole_piece(name, data)])
            state[key_there(name)] = data
        state[ABOUT] = json.dumps({"step": reader.step, "extra": reader.extra})
    dcp.save(state, checkpoint_id=str(directory), no_dist=True)


def import_torch(directory: str | Path, path: str | Path, step: int = 0) -> Path:
    """Write a checkpoint of torch's as one of ours, into the run `path`.

    Args:
        step: of a checkpoint that torch's users made; ours know theirs.

    CheckpointError if it has no tensor below "model".
    """
    state = read_all(directory)
    given: dict[str, Any] = {
        "step": step,
        "extra": {"user": None, "ranks": 0, "groups": None, "optimizer": None},
    }
    if ABOUT in state:
        given = json.loads(state.pop(ABOUT))
    tensors = {key: t for key, t in state.items() if isinstance(t, Tensor)}
    shapes = {
        key.removeprefix("model."): tuple(t.shape)
        for key, t in tensors.items()
        if key.startswith("model.")
    }
    if not shapes:
        raise CheckpointError(f'{directory} has no tensor below "model"')
    pieces = [whole_piece(name_here(key, t, shapes), t) for key, t in tensors.items()]
    return save_pieces(path, given["step"], pieces, given["extra"])


def whole_piece(name: str, data: Tensor) -> Piece:
    """A tensor as the one box it is."""
    shape = tuple(data.shape)
    return Piece(name, shape, (0,) * len(shape), data)


def key_there(name: str) -> str:
    """Of a tensor with this name in a checkpoint of ours."""
    if not name.startswith(":"):
        return f"model.{name}"
    kind, key, rest = name[1:].split(":", 2)
    return (
        f"random.{key}.{rest}" if kind == "random" else f"optimizer.state.{rest}.{key}"
    )


def name_here(key: str, data: Tensor, shapes: dict[str, tuple[int, ...]]) -> str:
    """The inverse of `key_there`: state of the parameter's shape is cut as it is."""
    top, _, rest = key.partition(".")
    if top == "model":
        return rest
    if top == "random":
        device, _, rank = rest.rpartition(".")
        return f":random:{device}:{rank}"
    name, _, kind = rest.removeprefix("state.").rpartition(".")
    if top != "optimizer" or name not in shapes:
        raise CheckpointError(f"{key} is no tensor of a model, nor of its optimizer")
    is_cut = data.dim() > 0 and tuple(data.shape) == shapes[name]
    return f":{'cut' if is_cut else 'number'}:{kind}:{name}"


def read_all(directory: str | Path) -> dict[str, Any]:
    """Every entry of a checkpoint of torch's, by its flat key."""
    reader = dcp.FileSystemReader(str(directory))
    try:
        found = reader.read_metadata().state_dict_metadata
    except (OSError, ValueError, EOFError) as error:
        raise CheckpointError(
            f"{directory} is no checkpoint of torch's: {error}"
        ) from None
    state: dict[str, Any] = {}
    for key, about in found.items():
        if isinstance(about, TensorStorageMetadata):
            dtype = about.properties.dtype
            state[key] = torch.empty(about.size, dtype=dtype, device="cpu")
        else:
            state[key] = ""
    dcp.load(state, storage_reader=reader, no_dist=True)
    return state
