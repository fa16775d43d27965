"""Llama checkpoints in Hugging Face's layout, straight into shards and out of them.

    config.json                          sizes
    model.safetensors                    all tensors, or
    model-00001-of-00003.safetensors ... several files, and
    model.safetensors.index.json         which tensor is in which

Loading, each rank reads the elements of its own slices and no others. Saving, one rank
collects one file's tensors at a time and writes them.
"""

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import About, CheckpointError, Shard
from xtrain.checkpoint.bare_file import about, opened_safetensors, read_box
from xtrain.comm.agreement import raising_everywhere
from xtrain.model.decoder import XtrainModel
from xtrain.model.hf_config import config_from_hf, config_to_hf

FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
MAX_FILE_BYTES = 5 * 10**9


def load_hf(
    directory: str | Path,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
) -> XtrainModel:
    """The model of a Llama checkpoint, cut over `mesh`; every rank of it calls this.

    Args:
        directory: with `config.json` and the safetensors.
        dtype: of the parameters; that of the file unless given.

    Raises:
        CheckpointError: on every rank: a file that cannot be read, a model of another
            kind, tensors that are missing, left over or of another shape, all named.
    """
    with _everywhere(mesh):
        directory = Path(directory)
        config = config_from_hf(_read_json(directory / "config.json"))
        model = XtrainModel(config, mesh, device="meta")
        files = _files_of(directory)
        stored = _check_names(model, files)
        model.to(dtype or stored)
        model.to_empty(device=torch.get_default_device())
        for path, names in files.items():
            _fill(model, path, names)
    return model


def save_hf(
    model: XtrainModel, directory: str | Path, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a checkpoint as `transformers` does; every rank of the mesh calls this.

    The dtype is kept; a tied head is left out. The directory is made.

    Args:
        max_file_bytes: a file is closed before it gets larger; a tensor is never cut.

    Raises:
        CheckpointError: on every rank, when one cannot write.
    """
    directory, writes = Path(directory), _is_writer(model)
    parameters = dict(model.named_parameters())
    groups = _split_into_files(model, max_file_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    with _everywhere(model.mesh):
        if writes:
            directory.mkdir(parents=True, exist_ok=True)
    for number, names in enumerate(groups):
        one = len(groups) == 1
        path = FILE if one else f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for name in names:
            full = _gather(model, name, parameters[name].detach())
            if full is not None:
                tensors[hf_name(name)] = full
        with _everywhere(model.mesh):
            if writes:
                save_file(tensors, directory / path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(map(hf_name, names), path)
        total += sum(t.nbytes for t in tensors.values())
    with _everywhere(model.mesh):
        if writes:
            dtype = str(next(iter(parameters.values())).dtype).removeprefix("torch.")
            _write_json(directory / "config.json", config_to_hf(model.config, dtype))
            if len(groups) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                _write_json(directory / INDEX, index)


def hf_name(name: str) -> str:
    """The name that `transformers` gives to our parameter `name`."""
    return name if name.startswith("lm_head.") else f"model.{name}"


def shard_of(model: XtrainModel, name: str, parameter: Tensor) -> Shard:
    """The parameter as a slice of its full tensor."""
    place = model.placement(name)
    offset = [0] * parameter.dim()
    offset[place.dim] = place.index * parameter.shape[place.dim]
    shape = tuple(place.full_shape(parameter))
    return Shard(name, shape, tuple(offset), parameter.detach())


def _fill(model: XtrainModel, path: Path, names: set[str]) -> None:
    """Copy this rank's slices out of one file."""
    with opened_safetensors(path) as opened:
        for name, parameter in model.named_parameters():
            if hf_name(name) in names:
                for piece in shard_of(model, name, parameter).pieces():
                    piece.data.copy_(read_box(opened, hf_name(name), piece.box))


def _check_names(model: XtrainModel, files: dict[Path, set[str]]) -> torch.dtype:
    """CheckpointError unless the files have the model's tensors; their dtype."""
    needed = {
        hf_name(name): tuple(model.placement(name).full_shape(parameter))
        for name, parameter in model.named_parameters()
    }
    there: dict[str, About] = {}
    for path, names in files.items():
        with opened_safetensors(path) as opened:
            inside = set(opened.keys())
            if names - inside:
                raise CheckpointError(f"{path} has no {sorted(names - inside)[:3]}")
            there |= {name: about(opened, name) for name in names}
    if model.config.tie_word_embeddings:
        there.pop("lm_head.weight", None)  # the embedding once more
    problems = [
        f"{name}: {'missing' if name not in there else 'left over'}"
        for name in sorted(needed.keys() ^ there.keys())
    ]
    problems += [
        f"{name}: {list(there[name].shape)} in the file, {list(shape)} by config.json"
        for name, shape in needed.items()
        if name in there and there[name].shape != shape
    ]
    if problems:
        raise CheckpointError("tensors do not fit: " + "; ".join(problems[:5]))
    return there["model.embed_tokens.weight"].dtype


def _files_of(directory: Path) -> dict[Path, set[str]]:
    """Each file with the names of its tensors that count."""
    if (directory / INDEX).exists():
        files: dict[Path, set[str]] = {}
        for name, file in _read_json(directory / INDEX).get("weight_map", {}).items():
            if not isinstance(file, str) or Path(file).name != file:
                raise CheckpointError(f"{INDEX}: {file!r} is no file of the directory")
            files.setdefault(directory / file, set()).add(name)
        return files
    with opened_safetensors(directory / FILE) as opened:
        return {directory / FILE: set(opened.keys())}


def _split_into_files(model: XtrainModel, most: int) -> list[list[str]]:
    """Names in order, as many a file as fit."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name, parameter in model.named_parameters():
        nbytes = parameter.nbytes * model.placement(name).count
        if groups[-1] and filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    return groups


def _gather(model: XtrainModel, name: str, local: Tensor) -> Tensor | None:
    """The full parameter on the rank that writes, None on all others."""
    if model.data is not None and model.data.rank() != 0:
        return None
    place, group = model.placement(name), model.tensor
    if group is None or place.count == 1:
        return local.cpu().contiguous() if _is_writer(model) else None
    pieces = None
    if group.rank() == 0:
        pieces = [torch.empty_like(local) for _ in range(group.size())]
    dist.gather(local.contiguous(), pieces, group_dst=0, group=group)
    if pieces is None:
        return None
    distinct = pieces[:: group.size() // place.count]  # one of equal replicas
    return torch.cat(distinct, place.dim).cpu()


def _is_writer(model: XtrainModel) -> bool:
    return all(g is None or g.rank() == 0 for g in (model.data, model.tensor))


def _everywhere(mesh: DeviceMesh | None) -> AbstractContextManager:
    """What one rank raises, all raise as a CheckpointError."""
    if mesh is None:
        return _as_checkpoint_error()
    return raising_everywhere(CheckpointError, group=None)


@contextmanager
def _as_checkpoint_error() -> Iterator[None]:
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(str(error)) from error


def _read_json(path: Path) -> dict:
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(found, dict):
        raise CheckpointError(f"{path} is no JSON object")
    return found


def _write_json(path: Path, values: dict) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n")
