"""Llama and Mixtral checkpoints in Hugging Face's layout, out of shards.

The files are those of `hf_load`, as `transformers` itself writes them. One rank
collects one file's tensors at a time and writes them.
"""

from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import save_file

from xtrain.model.decoder import XtrainModel
from xtrain.model.hf_collect import Collector
from xtrain.model.hf_config import check_architecture, config_to_hf
from xtrain.model.hf_files import CONFIG, FILE, INDEX, everywhere, write_json
from xtrain.model.hf_shapes import check_own_shapes, whole_shapes
from xtrain.model.placement import check_whole_world
from xtrain.model.stages import stage_modules
from xtrain.pipeline_parallel import PipelineStage

MAX_FILE_BYTES = 5 * 10**9


def save_hf(
    model: XtrainModel | Sequence[PipelineStage],
    directory: str | Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a checkpoint as `transformers` does; every rank of the mesh calls this.

    The dtype is kept; a tied head is left out. What `load_hf` has found and this model
    does not read (ids of tokens, the longest sequence, `generation_config.json`) is
    written again. The directory is made.

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
    with everywhere(mesh):
        if collector.writes:
            directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups):
        one = len(groups) == 1
        path = FILE if one else f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        total += _collect_and_write(collector, names, directory / path)
        weight_map |= dict.fromkeys(names, path)
    with everywhere(mesh):
        if collector.writes:
            dtype = str(collector.dtype).removeprefix("torch.")
            carried = modules[0].carried
            for name in {CONFIG, *carried}:
                own = config_to_hf(config, dtype) if name == CONFIG else {}
                write_json(directory / name, carried.get(name, {}) | own)
            if len(groups) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                write_json(directory / INDEX, index)


def _collect_and_write(collector: Collector, names: list[str], path: Path) -> int:
    """One file; the bytes of its tensors on the rank that writes, 0 elsewhere."""
    tensors = {}
    for name in names:
        full = collector.collect(name)
        if full is not None:
            tensors[name] = full
    with everywhere(collector.mesh):
        if collector.writes:
            save_file(tensors, path, metadata={"format": "pt"})
    return sum(t.nbytes for t in tensors.values())


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
