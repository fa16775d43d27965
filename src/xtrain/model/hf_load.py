"""Checkpoints of dense models and Mixtral in Hugging Face's layout, into shards.

    config.json                          sizes
    model.safetensors                    all tensors, or
    model-00001-of-00003.safetensors ... several files, and
    model.safetensors.index.json         which tensor is in which

Each rank reads the elements of its own stages, experts and slices and no others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import About, CheckpointError, Shard
from xtrain.checkpoint.bare_file import about, opened_safetensors, read_box
from xtrain.model.config import XtrainConfig, padded_for
from xtrain.model.decoder import XtrainModel
from xtrain.model.decoder_parts import Carried, DecoderParts
from xtrain.model.hf_config import config_from_hf
from xtrain.model.hf_files import (
    CONFIG,
    GENERATION,
    Files,
    everywhere,
    files_of,
    named,
    only_dtype,
    read_json,
)
from xtrain.model.hf_names import check_counts, hf_sources, tensors_of
from xtrain.model.mesh_axes import axis_size, check_whole_world
from xtrain.model.parameters import TABLES
from xtrain.model.stages import as_stages, check_ranks, make_modules
from xtrain.pipeline_parallel import PipelineStage
from xtrain.schedules import Schedule


class Found(NamedTuple):
    """What a directory has, before a tensor of it is read.

    Attributes:
        files: each with the names of its tensors.
        tensors: shape and dtype of each.
        carried: all entries of `config.json` and `generation_config.json`.
    """

    config: XtrainConfig
    files: Files
    tensors: dict[str, About]
    carried: Carried


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

    A vocabulary that the tensor ranks do not divide is padded: `padded_vocab_size`.

    Raises:
        CheckpointError: on every rank: a file that cannot be read, a model of another
            kind, tensors that are missing, left over or of another shape, all named.
        ValueError: the mesh is not that of all ranks.
    """
    check_whole_world(mesh)
    with everywhere(mesh):
        found = look(directory)
        kind = dtype or only_dtype(found.tensors)
        config = padded_for(found.config, axis_size(mesh, "tensor"))
    with everywhere(mesh):
        model = XtrainModel(config, mesh, device="meta", dtype=kind, **options)
        _load([model], found)
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
    with everywhere(mesh):
        found = look(directory)
        kind = dtype or only_dtype(found.tensors)
        config = padded_for(found.config, axis_size(mesh, "tensor"))
    with everywhere(mesh):
        options |= {"device": "meta", "dtype": kind}
        modules = make_modules(config, mesh, schedule, **options)
        _load(list(modules.values()), found)
    return as_stages(modules, schedule.stages)


def look(directory: str | Path) -> Found:
    """What the files say of their model; no tensor is read.

    Raises:
        CheckpointError: as `load_hf`, on this rank alone.
    """
    path = Path(directory) / CONFIG
    values = read_json(path)
    with named(path):
        config = config_from_hf(values)
    files = files_of(path.parent)
    there = _check_names(config, files)
    carried = {path.name: values}
    generation = path.with_name(GENERATION)
    if generation.exists():
        carried[GENERATION] = read_json(generation)
    return Found(config, files, there, carried)


def _load(modules: Sequence[DecoderParts], found: Found) -> None:
    """Give modules on the meta device memory, and what the files have for them."""
    for module in modules:
        module.carried = found.carried
        module.to_empty(device=torch.get_default_device())
        for name, parameter in module.named_parameters():
            if name in TABLES:  # rows that pad the vocabulary are in no file
                parameter.detach().zero_()
        shards = [
            module.placement(name).shard(name, parameter)
            for name, parameter in module.named_parameters()
        ]
        fill(shards, found)


def fill(shards: Sequence[Shard], found: Found) -> None:
    """Give shards of parameters, in any layout, what the files have for them.

    Rows that pad the vocabulary stay as they are. CheckpointError, on this rank alone,
    for a file that cannot be read.
    """
    for path, names in found.files.items():
        with opened_safetensors(path) as opened:
            for piece in (piece for shard in shards for piece in shard.pieces()):
                for stored, box, data in tensors_of(piece):
                    if stored in names:
                        data.copy_(read_box(opened, stored, box))


def _check_names(config: XtrainConfig, files: Files) -> dict[str, About]:
    """The files' tensors; CheckpointError unless they are those of the whole model."""
    check_counts(config, sum(map(len, files.values())))
    with named(Path(CONFIG)):
        sources = hf_sources(config)
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
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(f"tensors do not fit: {problems[0]}{more}")
    whole = [n for n, a in there.items() if not a.dtype.is_floating_point]
    if whole:
        raise CheckpointError(f"{whole[0]} is {there[whole[0]].dtype}, not floating")
    return there
