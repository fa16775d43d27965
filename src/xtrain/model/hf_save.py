"""Checkpoints of dense models and Mixtral in Hugging Face's layout, out of shards.

    tensor of a file    # # # # . . . .  from rank 0, its own
                        # # # # . . . .
                        + + + + * * * *  from ranks 2 and 3: boxes of any sizes
                        + + + + * * * *

The files are those of `hf_load`, as `transformers` itself writes them. Every rank lists
the boxes that it holds of each tensor: a slice of a tensor rank, an expert, a flat
shard of ZeRO. Rank 0 receives them tensor by tensor and writes each before the next, so
no rank needs room for more than its own part and one tensor. What several ranks hold,
the first of them sends: every element is sent once, or lies on rank 0 already.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from xtrain.checkpoint import About, Shard
from xtrain.checkpoint.boxes import Box
from xtrain.comm.agreement import values_of_all
from xtrain.comm.checks import message_device
from xtrain.model.config import XtrainConfig
from xtrain.model.decoder import XtrainModel
from xtrain.model.decoder_parts import Carried
from xtrain.model.hf_config import check_architecture, entries_to_write
from xtrain.model.hf_files import (
    CONFIG,
    FILE,
    INDEX,
    everywhere,
    write_json,
    write_safetensors,
)
from xtrain.model.hf_names import (
    check_own_shapes,
    hf_sources,
    tensors_of,
    whole_shapes,
)
from xtrain.model.mesh_axes import check_whole_world, mesh_group
from xtrain.model.stage_gradients import stage_modules
from xtrain.pipeline_parallel import PipelineStage

MAX_FILE_BYTES = 5 * 10**9
Dtypes = Mapping[str, torch.dtype]
"""Of tensors, by their names in the files."""


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
    check_own_shapes(modules, whole_shapes(config))
    shards = [
        module.placement(name).shard(name, parameter)
        for module in modules
        for name, parameter in module.named_parameters()
    ]
    carried = modules[0].carried
    write_hf(directory, shards, config, mesh, carried, max_file_bytes=max_file_bytes)


def write_hf(
    directory: str | Path,
    shards: Sequence[Shard],
    config: XtrainConfig,
    mesh: DeviceMesh | None,
    carried: Carried,
    *,
    dtypes: Dtypes | None = None,
    metadata: Mapping[str, str] | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """`save_hf` of shards in any layout: those of all ranks make up every parameter.

    Args:
        carried: entries of files that the model comes from.
        dtypes: of the files' tensors; those of the shards unless given.
        metadata: of each file, besides its format.

    Raises:
        CheckpointError, ValueError: as `save_hf`.
    """
    check_whole_world(mesh)
    check_architecture(config)
    directory, collector = Path(directory), Collector(shards, config, mesh, dtypes)
    groups = _split_into_files(collector, max_file_bytes)
    with everywhere(mesh):
        if collector.writes:
            directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    total = 0
    for number, names in enumerate(groups):
        one = len(groups) == 1
        path = FILE if one else f"model-{number + 1:05}-of-{len(groups):05}.safetensors"
        total += _collect_and_write(collector, names, directory / path, metadata or {})
        weight_map |= dict.fromkeys(names, path)
    with everywhere(mesh):
        if collector.writes:
            dtype = collector.tensors[next(iter(collector.tensors))].dtype
            own = entries_to_write(config, dtype, carried.get(CONFIG, {}))
            for name, entries in {**carried, CONFIG: own}.items():
                write_json(directory / name, entries)
            if len(groups) > 1:
                index = {"metadata": {"total_size": total}, "weight_map": weight_map}
                write_json(directory / INDEX, index)


class Collector:
    """Whole tensors of files on rank 0, from the boxes that all ranks hold.

    Attributes:
        tensors: shape and dtype of each, in the order of the files.
        held: this rank's boxes of each, as views of its shards.
        owners: each box of a tensor, and the first rank that holds it.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        config: XtrainConfig,
        mesh: DeviceMesh | None,
        dtypes: Dtypes | None = None,
    ):
        self.mesh, self.group = mesh, mesh_group(mesh)
        self.rank = 0 if mesh is None else dist.get_rank(self.group)
        self.writes = self.rank == 0
        self.held: dict[tuple[str, Box], Tensor] = {}
        for piece in (piece for shard in shards for piece in shard.pieces()):
            for name, box, data in tensors_of(piece):
                self.held[name, box] = data
        mine = [(key, data.dtype) for key, data in self.held.items()]
        everywhere = [mine] if mesh is None else values_of_all(mine, self.group)
        self.owners: dict[str, dict[Box, int]] = {}
        found: dict[str, torch.dtype] = {}
        for rank, theirs in enumerate(everywhere):
            for (name, box), dtype in theirs:
                self.owners.setdefault(name, {}).setdefault(box, rank)
                found.setdefault(name, dtype)
        self.tensors = {
            name: About(tuple(source.shape), (dtypes or found)[name])
            for name, source in hf_sources(config).items()
        }

    def nbytes(self, name: str) -> int:
        """Of the whole tensor of a file."""
        shape, dtype, _ = self.tensors[name]
        return torch.Size(shape).numel() * dtype.itemsize

    def collect(self, names: Sequence[str]) -> Iterator[Tensor]:
        """The whole tensors, one after the other, on rank 0; no tensors elsewhere."""
        for name in names:
            if self.writes:
                yield self._whole(name)
            else:
                self._send(name)

    def _whole(self, name: str) -> Tensor:
        """A tensor from its boxes, on the CPU."""
        shape, dtype, _ = self.tensors[name]
        whole = torch.empty(shape, dtype=dtype, device="cpu")
        outer = Box((0,) * len(shape), shape)
        for box, rank in self.owners[name].items():
            whole[box.slices_in(outer)].copy_(self._box(name, box, rank))
        return whole

    def _send(self, name: str) -> None:
        """The boxes of which this rank is the first, to rank 0."""
        device, dtype = message_device(self.group), self.tensors[name].dtype
        for box, rank in self.owners[name].items():
            if rank == self.rank:
                data = self.held[name, box].to(device, dtype).contiguous()
                dist.send(data, group=self.group, group_dst=0)

    def _box(self, name: str, box: Box, rank: int) -> Tensor:
        """A box on rank 0, its own or that of another rank."""
        if rank == self.rank:
            return self.held[name, box]
        dtype, device = self.tensors[name].dtype, message_device(self.group)
        data = torch.empty(box.size, dtype=dtype, device=device)
        dist.recv(data, group=self.group, group_src=rank)
        return data


def _collect_and_write(
    collector: Collector, names: list[str], path: Path, metadata: Mapping[str, str]
) -> int:
    """One file, a tensor at a time; the bytes of its tensors.

    When it cannot be written, the other ranks still send what they have begun to send,
    and then all raise.
    """
    tensors = collector.collect(names)
    with everywhere(collector.mesh):
        try:
            if collector.writes:
                about = {name: collector.tensors[name] for name in names}
                metadata = {**metadata, "format": "pt"}
                write_safetensors(path, about, tensors, metadata)
        finally:
            for _ in tensors:
                pass
    return sum(map(collector.nbytes, names))


def _split_into_files(collector: Collector, most: int) -> list[list[str]]:
    """Names in order, as many a file as fit; in a file the widest dtypes come first."""
    groups: list[list[str]] = [[]]
    filled = 0
    for name in collector.tensors:
        nbytes = collector.nbytes(name)
        if groups[-1] and filled + nbytes > most:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += nbytes
    for group in groups:  # each tensor begins at a multiple of its elements' size
        group.sort(key=lambda name: -collector.tensors[name].dtype.itemsize)
    return groups
