"""Llama and Mixtral checkpoints in Hugging Face's layout, into shards and out of them.

    config.json                          sizes
    model.safetensors                    all tensors, or
    model-00001-of-00003.safetensors ... several files, and
    model.safetensors.index.json         which tensor is in which

Loading, each rank reads the elements of its own stages, experts and slices and no
others. Saving, one rank collects one file's tensors at a time and writes them.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import About, CheckpointError
from xtrain.checkpoint.bare_file import about, opened_safetensors, read_box
from xtrain.comm.agreement import raising_everywhere
from xtrain.model.config import XtrainConfig
from xtrain.model.decoder import XtrainModel
from xtrain.model.hf_collect import Collector
from xtrain.model.hf_config import check_architecture, config_from_hf, config_to_hf
from xtrain.model.hf_files import (
    FILE,
    INDEX,
    as_checkpoint_error,
    files_of,
    only_dtype,
    read_json,
    write_json,
)
from xtrain.model.hf_names import hf_sources, tensors_of
from xtrain.model.placement import check_whole_world
from xtrain.model.span import DecoderSpan
from xtrain.model.stages import (
    as_stages,
    check_ranks,
    make_modules,
    stage_modules,
)
from xtrain.pipeline_parallel import PipelineStage
from xtrain.schedules import Schedule

MAX_FILE_BYTES = 5 * 10**9


def load_hf(
    directory: str | Path,
    mesh: DeviceMesh | None = None,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> XtrainModel:
    """The model of a checkpoint, cut over `mesh`; every rank of it calls this.

    Args:
        directory: with `config.json` and the safetensors.
        dtype: of the parameters; that of the files, if all have one, unless given.
        options: of an `XtrainModel`.

    Raises:
        CheckpointError: on every rank: a file that cannot be read, a model of another
            kind, tensors that are missing, left over or of another shape, all named.
        ValueError: the mesh is not that of all ranks.
    """
    check_whole_world(mesh)
    with _everywhere(mesh):
        config = _read_config(directory)
        model = XtrainModel(config, mesh, device="meta", **options)
        _load([model], config, Path(directory), dtype)
    return model


def load_hf_stages(
    directory: str | Path,
    mesh: DeviceMesh | None,
    schedule: Schedule,
    dtype: torch.dtype | None = None,
    **options: Any,
) -> list[PipelineStage]:
    """This rank's stages of a checkpoint; every rank of the mesh calls this.

    Tensors of other stages are not read.

    Args:
        directory, dtype: as for `load_hf`.
        mesh, schedule, options: as for `XtrainModel.stages`.

    Raises:
        CheckpointError, ValueError: as `load_hf` and `XtrainModel.stages`.
    """
    check_whole_world(mesh)
    check_ranks(mesh, schedule)
    with _everywhere(mesh):
        config = _read_config(directory)
        modules = make_modules(config, mesh, schedule, device="meta", **options)
        _load(list(modules.values()), config, Path(directory), dtype)
    return as_stages(modules, schedule.stages)


def save_hf(
    model: XtrainModel | Sequence[PipelineStage],
    directory: str | Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint as `transformers` does; every rank of the mesh calls this.

    The dtype is kept; a tied head is left out. The directory is made.

    Args:
        model: or this rank's stages of one; the files are the same.
        max_file_bytes: a file is closed before it gets larger; a tensor is never cut.

    Raises:
        CheckpointError: on every rank, when one cannot write.
        ValueError: a wrapper has sharded the parameters, or the mesh is not that of
            all ranks, or the experts are none of a Mixtral.
    """
    modules = [model] if isinstance(model, XtrainModel) else stage_modules(model)
    config, mesh = modules[0].config, modules[0].mesh
    check_whole_world(mesh)
    check_architecture(config)
    shapes = whole_shapes(config)
    check_own_shapes(modules, shapes)
    directory, collector = Path(directory), Collector(modules, shapes)
    groups = _split_into_files(collector, max_file_bytes)
    weight_map: dict[str, str] = {}
    total = 0
    with _everywhere(mesh):
        if collector.writes:
            directory.mkdir(parents=True, exist_ok=True)
    for number, names in enumerate(groups):
        one = len(groups) == 1
        path = FILE if one else f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        tensors = {}
        for name in names:
            full = collector.collect(name)
            if full is not None:
                tensors[name] = full
        with _everywhere(mesh):
            if collector.writes:
                save_file(tensors, directory / path, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(names, path)
        total += sum(t.nbytes for t in tensors.values())
    with _everywhere(mesh):
        if collector.writes:
            dtype = str(collector.dtype).removeprefix("torch.")
            write_json(directory / "config.json", config_to_hf(config, dtype))
            if len(groups) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                write_json(directory / INDEX, index)


def whole_shapes(config: XtrainConfig) -> dict[str, torch.Size]:
    """Every parameter of the whole model, in order, with its shape."""
    whole = XtrainModel(config, device="meta")
    return {name: parameter.shape for name, parameter in whole.named_parameters()}


def check_own_shapes(
    modules: Sequence[DecoderSpan], shapes: dict[str, torch.Size]
) -> None:
    """ValueError if parameters are no longer the model's, as inside FSDP."""
    for module in modules:
        for name, parameter in module.named_parameters():
            full = torch.empty(shapes[name], device="meta")
            shape = module.placement(name).of(full).shape
            if parameter.shape != shape:
                raise ValueError(
                    f"{name} has shape {list(parameter.shape)} and not {list(shape)}: "
                    "a wrapper has sharded it, so load its full_state_dict into a bare "
                    "model"
                )


def _read_config(directory: str | Path) -> XtrainConfig:
    return config_from_hf(read_json(Path(directory) / "config.json"))


def _load(
    modules: Sequence[DecoderSpan],
    config: XtrainConfig,
    directory: Path,
    dtype: torch.dtype | None,
) -> None:
    """Give modules on the meta device memory, and what the files have for them."""
    files = files_of(directory)
    there = _check_names(config, files)
    for module in modules:
        module.to(dtype or only_dtype(there))
        module.to_empty(device=torch.get_default_device())
        for path, names in files.items():
            _fill(module, path, names)


def _fill(module: DecoderSpan, path: Path, names: set[str]) -> None:
    """Copy this rank's slices out of one file."""
    with opened_safetensors(path) as opened:
        for name, parameter in module.named_parameters():
            for piece in module.placement(name).shard(name, parameter).pieces():
                for stored, box, data in tensors_of(piece):
                    if stored in names:
                        data.copy_(read_box(opened, stored, box))


def _check_names(config: XtrainConfig, files: dict[Path, set[str]]) -> dict[str, About]:
    """What the files have; CheckpointError unless it is the whole model's tensors."""
    sources = hf_sources(whole_shapes(config))
    needed = {name: source.shape for name, source in sources.items()}
    there: dict[str, About] = {}
    for path, names in files.items():
        with opened_safetensors(path) as opened:
            inside = set(opened.keys())
            if names - inside:
                raise CheckpointError(f"{path} has no {sorted(names - inside)[:3]}")
            there |= {name: about(opened, name) for name in names}
    if config.tie_word_embeddings:
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


def _split_into_files(collector: Collector, most: int) -> list[list[str]]:
    """Names in order, as many a file as fit."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in collector.sources:
        nbytes = collector.nbytes(name)
        if groups[-1] and filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    return groups


def _everywhere(mesh: DeviceMesh | None) -> AbstractContextManager:
    """What one rank raises, all raise as a CheckpointError."""
    if mesh is None:
        return as_checkpoint_error()
    return raising_everywhere(CheckpointError, group=None)
