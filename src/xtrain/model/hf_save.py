"""Checkpoints of dense models and Mixtral in Hugging Face's layout, out of shards.

    pipeline   0: embedding, layer 0     1: layer 1, head
    expert     experts 0, 1              experts 2, 3
    tensor     slices 0, 1, 2            slices 0, 1, 2

The files are those of `hf_load`, as `transformers` itself writes them. One rank, the
first of every axis, collects one file's tensors at a time and writes them: a tensor's
slices are gathered on tensor rank 0, an expert's tensor goes from its expert rank to
the first one, and each tensor from the pipeline rank that holds it to the first.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.checkpoint.parameter_slice import Placement
from xtrain.comm.mesh import REPLICA_AXES, axis_group
from xtrain.model.decoder import XtrainModel
from xtrain.model.decoder_parts import DecoderParts
from xtrain.model.hf_config import check_architecture, config_to_hf
from xtrain.model.hf_files import CONFIG, FILE, INDEX, everywhere, write_json
from xtrain.model.hf_names import check_own_shapes, hf_sources, whole_shapes
from xtrain.model.mesh_axes import check_whole_world, is_first
from xtrain.model.stage_gradients import stage_modules
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
            all ranks, or the experts are not those of a Mixtral.
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
            kind = carried.get(CONFIG, {}).get("model_type")
            for name in {CONFIG, *carried}:
                own = config_to_hf(config, dtype, kind) if name == CONFIG else {}
                write_json(directory / name, own | (carried.get(name, {}) | own))
            if len(groups) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                write_json(directory / INDEX, index)


class Collector:
    """Whole tensors on the rank that writes, from all ranks of a mesh."""

    def __init__(self, modules: Sequence[DecoderParts], shapes: dict[str, torch.Size]):
        self.sources, self.mesh = hf_sources(modules[0].config), modules[0].mesh
        self.held = {
            name: (module, parameter.detach())
            for module in modules
            for name, parameter in module.named_parameters()
        }
        self.pipeline, self.expert, self.tensor, *alike = (
            axis_group(self.mesh, axis)
            for axis in ("pipeline", "expert", "tensor", *REPLICA_AXES, "context")
        )
        self.takes_part = all(map(is_first, alike))
        cut = self.pipeline, self.expert, self.tensor
        self.writes = all(map(is_first, (*cut, *alike)))
        mine = {name: parameter.dtype for name, (_, parameter) in self.held.items()}
        held: list[Any] = [mine]
        if self.pipeline is not None:
            held = [None] * self.pipeline.size()
            dist.all_gather_object(held, mine, group=self.pipeline)
        self.dtypes = {n: dtype for names in held for n, dtype in names.items()}
        self.dtype = self.dtypes[next(iter(shapes))]
        ranks = reversed(list(enumerate(held)))
        self.holder = {name: rank for rank, names in ranks for name in names}
        """The first pipeline rank that holds a parameter."""

    def nbytes(self, name: str) -> int:
        """Of the whole tensor of a file."""
        source = self.sources[name]
        return source.shape.numel() * self.dtypes[source.parameter].itemsize

    def collect(self, name: str) -> Tensor | None:
        """The whole tensor on the rank that writes, None on all others."""
        parameter, expert, shape = self.sources[name]
        if not self.takes_part:
            return None
        holder, whole, owner = self.holder[parameter], None, 0
        if rank_in(self.pipeline) == holder:
            if expert is not None:
                owner = expert // len(self.held[parameter][1])
            if rank_in(self.expert) == owner:
                whole = self._gather_slices(parameter, expert)
                if whole is not None:  # less the rows that pad the vocabulary
                    whole = whole[: shape[0]]
            if is_first(self.tensor):
                whole = self._to_first(whole, name, owner, self.expert)
        if is_first(self.tensor) and is_first(self.expert):
            whole = self._to_first(whole, name, holder, self.pipeline)
        return None if whole is None or not self.writes else whole.cpu()

    def _to_first(
        self, whole: Tensor | None, name: str, source: int, group: ProcessGroup | None
    ) -> Tensor | None:
        """From rank `source` of a group, which has the tensor, to its first rank."""
        if source == 0 or group is None:
            return whole
        if group.rank() == source:
            assert whole is not None
            dist.send(whole, group=group, group_dst=0)
        if group.rank() > 0:
            return None
        parameter, _, shape = self.sources[name]
        device = next(iter(self.held.values()))[1].device
        whole = torch.empty(shape, dtype=self.dtypes[parameter], device=device)
        dist.recv(whole, group=group, group_src=source)
        return whole

    def _gather_slices(self, name: str, expert: int | None) -> Tensor | None:
        """The whole tensor on the first of the tensor ranks."""
        module, local = self.held[name]
        place, group = module.placement(name), self.tensor
        if expert is not None:
            local = local[expert % len(local)]
            place = place.inner or Placement()
            place = replace(place, dim=place.dim - 1)
        first = is_first(group)
        if group is None or place.count == 1:
            return local.contiguous() if first else None
        pieces = [torch.empty_like(local) for _ in range(group.size())]
        dist.gather(
            local.contiguous(), pieces if first else None, group_dst=0, group=group
        )
        distinct = pieces[:: group.size() // place.count]  # one of equal replicas
        return torch.cat(distinct, place.dim) if first else None


def rank_in(group: ProcessGroup | None) -> int:
    """This rank's number on an axis; 0 on one that the mesh does not have."""
    return 0 if group is None else group.rank()


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
