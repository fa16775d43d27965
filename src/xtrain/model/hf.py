"""Llama checkpoints in Hugging Face's layout, straight into shards and out of them.

    config.json                          sizes
    model.safetensors                    all tensors, or
    model-00001-of-00003.safetensors ... several files, and
    model.safetensors.index.json         which tensor is in which

Loading, each rank reads the elements of its own slices and no others. Saving, one rank
collects one file's tensors at a time and writes them.
"""

from contextlib import AbstractContextManager
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
from xtrain.model.hf_files import (
    FILE,
    INDEX,
    as_checkpoint_error,
    files_of,
    only_dtype,
    read_json,
    write_json,
)

MAX_FILE_BYTES = 5 * 10**9


def load_hf(
    directory: str | Path,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
) -> XtrainModel:
    """The model of a Llama checkpoint, cut over `mesh`; every rank of it calls this.

    Args:
        directory: with `config.json` and the safetensors.
        dtype: of the parameters; that of the files, if all have one, unless given.

    Raises:
        CheckpointError: on every rank: a file that cannot be read, a model of another
            kind, tensors that are missing, left over or of another shape, all named.
        ValueError: the mesh is not that of all ranks.
    """
    check_whole_world(mesh)
    with _everywhere(mesh):
        directory = Path(directory)
        config = config_from_hf(read_json(directory / "config.json"))
        model = XtrainModel(config, mesh, device="meta")
        files = files_of(directory)
        there = _check_names(model, files)
        model.to(dtype or only_dtype(there))
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
        ValueError: a wrapper has sharded the parameters, or the mesh is not that of
            all ranks.
    """
    check_whole_world(model.mesh)
    check_own_shapes(model)
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
            write_json(directory / "config.json", config_to_hf(model.config, dtype))
            if len(groups) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                write_json(directory / INDEX, index)


def check_whole_world(mesh: DeviceMesh | None) -> None:
    """ValueError unless all ranks are in the mesh: they agree on what went wrong."""
    if mesh is not None and mesh.size() != dist.get_world_size():
        raise ValueError(
            f"a mesh of {mesh.size()} ranks in a world of {dist.get_world_size()}: "
            "all ranks load and save together"
        )


def check_own_shapes(model: XtrainModel) -> None:
    """ValueError if parameters are no longer the model's, as inside FSDP."""
    twin = XtrainModel(
        model.config,
        model.mesh,
        sequence_parallel=model.sequence_parallel,
        device="meta",
    )
    for name, parameter in model.named_parameters():
        shape = twin.get_parameter(name).shape
        if parameter.shape != shape:
            raise ValueError(
                f"{name} has shape {list(parameter.shape)} and not {list(shape)}: a "
                "wrapper has sharded it, so load its full_state_dict into a bare model"
            )


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


def _check_names(model: XtrainModel, files: dict[Path, set[str]]) -> dict[str, About]:
    """What the files have; CheckpointError unless it is the model's tensors."""
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
    whole = [n for n, a in there.items() if not a.dtype.is_floating_point]
    if whole:
        raise CheckpointError(f"{whole[0]} is {there[whole[0]].dtype}, not floating")
    return there


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
        return as_checkpoint_error()
    return raising_everywhere(CheckpointError, group=None)
