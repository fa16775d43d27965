"""Sharded checkpoints: each rank writes its own pieces, any number of ranks reads them.

    run/
      latest                        the name of the newest complete checkpoint
      step-00000020/
        index.json                  every tensor: shape, dtype, and which piece lies
        where rank-00000.safetensors      this rank's pieces, flat
        rank-00001.safetensors

A piece is a range of a flattened tensor. A rank that loads asks for the ranges it needs
and reads only the pieces that overlap them, so the world size may change, and nobody
ever holds a whole model.

A checkpoint is written beside its place, checked, and moved there in one step: a run
that dies while saving leaves the one before untouched. Every piece has a checksum.
"""

import json
import os
import secrets
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.comm.checks import rank_and_size

FORMAT = 1


class CheckpointError(RuntimeError):
    """A checkpoint that is damaged, incomplete or of another model."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Elements `start` to `start + data.numel()` of the flattened tensor `name`."""

    name: str
    shape: tuple[int, ...]
    start: int
    data: Tensor


def save_pieces(
    directory: str | Path,
    step: int,
    pieces: list[Piece],
    extra: dict[str, Any] | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Write a checkpoint from every rank's pieces; its path, on every rank.

    Together the ranks' pieces must cover every tensor. `extra` is any JSON value and is
    taken from rank 0. A failure on one rank raises on all.
    """
    rank, size = rank_and_size(group)
    directory = Path(directory)
    final = directory / f"step-{step:08d}"
    (token,) = agree([secrets.token_hex(4)], group)
    partial = directory / f".partial-{final.name}-{token}"
    manifest, problem = [], None
    try:
        if rank == 0:
            for leftover in directory.glob(".partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
        dist.barrier(group=group)
        partial.mkdir(parents=True, exist_ok=True)
        manifest = write_file(partial / f"rank-{rank:05d}.safetensors", pieces)
    except OSError as error:
        problem = f"rank {rank}: {error}"
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, (manifest, problem), group=group)
    problems = [p for _, p in gathered if p is not None]
    if not problems and rank == 0:
        try:
            index = make_index(step, extra, [m for m, _ in gathered])
            write_text(partial / "index.json", json.dumps(index, indent=1))
            if final.exists():
                shutil.rmtree(final)
            os.rename(partial, final)
            pointer = directory / f".latest-{token}"
            write_text(pointer, final.name)
            os.replace(pointer, directory / "latest")
        except (OSError, CheckpointError) as error:
            problems = [f"rank 0: {error}"]
    (problems,) = agree([problems], group)
    if problems:
        raise CheckpointError(f"{final} was not saved: {'; '.join(problems)}")
    return final


def latest(directory: str | Path) -> Path | None:
    """The newest complete checkpoint of a run; None when there is none."""
    pointer = Path(directory) / "latest"
    if not pointer.exists():
        return None
    return Path(directory) / pointer.read_text().strip()


class CheckpointReader:
    """A checkpoint's index, and ranges of its tensors on demand."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            self.index = json.loads((self.path / "index.json").read_text())
        except FileNotFoundError:
            raise CheckpointError(f"{path} is no checkpoint: no index.json") from None
        except ValueError as error:
            raise CheckpointError(f"{path}/index.json is damaged: {error}") from None
        if self.index.get("format") != FORMAT:
            found = self.index.get("format")
            raise CheckpointError(f"{path} has format {found}, this reads {FORMAT}")
        self.step: int = self.index["step"]
        self.extra: Any = self.index["extra"]
        self.tensors: dict[str, dict[str, Any]] = self.index["tensors"]
        for name, nbytes in self.index["files"].items():
            file = self.path / name
            found = file.stat().st_size if file.exists() else "no file"
            if found != nbytes:
                raise CheckpointError(
                    f"{file} is damaged: {nbytes} bytes, {found} found"
                )

    def check(self, wanted: list[Piece]) -> None:
        """CheckpointError naming every tensor that is missing or has another shape."""
        problems = []
        for piece in wanted:
            entry = self.tensors.get(piece.name)
            if entry is None:
                problems.append(f"{piece.name}: not in the checkpoint")
            elif tuple(entry["shape"]) != tuple(piece.shape):
                shapes = f"{entry['shape']} in the checkpoint, {list(piece.shape)} here"
                problems.append(f"{piece.name}: {shapes}")
        if problems:
            lines = "\n  ".join(problems)
            raise CheckpointError(f"{self.path} is of another model:\n  {lines}")

    def unexpected(self, wanted: list[Piece]) -> list[str]:
        """Tensors of the checkpoint that nobody asked for."""
        return sorted(self.tensors.keys() - {piece.name for piece in wanted})

    @torch.no_grad()
    def read(self, wanted: list[Piece]) -> None:
        """Fill the wanted pieces' `data`, reading only what overlaps them."""
        self.check(wanted)
        by_file: dict[str, list[tuple[Piece, int, int, int]]] = {}
        for piece in wanted:
            for start, stop, file, checksum in self.tensors[piece.name]["pieces"]:
                if start < piece.start + piece.data.numel() and piece.start < stop:
                    by_file.setdefault(file, []).append((piece, start, stop, checksum))
        for file, overlaps in by_file.items():
            try:
                with safe_open(self.path / file, framework="pt") as opened:
                    for piece, start, stop, checksum in overlaps:
                        stored = opened.get_tensor(f"{piece.name}@{start}")
                        if crc(stored) != checksum:
                            raise CheckpointError(
                                f"{self.path / file} is damaged: {piece.name}, elements "
                                f"{start} to {stop}, does not match its checksum"
                            )
                        copy_overlap(piece, stored, start)
            except SafetensorError as error:
                raise CheckpointError(
                    f"{self.path / file} is damaged: {error}"
                ) from None


@torch.no_grad()
def read_safetensors(path: str | Path, wanted: list[Piece]) -> None:
    """Fill pieces from a bare model's safetensors file, reading their ranges only."""
    with safe_open(path, framework="pt") as opened:
        names = set(opened.keys())
        for piece in wanted:
            if piece.name not in names:
                raise CheckpointError(f"{path}: {piece.name} is not in it")
            stored = opened.get_slice(piece.name)
            shape = tuple(stored.get_shape())
            if shape != tuple(piece.shape):
                raise CheckpointError(
                    f"{path}: {piece.name} is {list(shape)}, not {list(piece.shape)}"
                )
            count = piece.data.numel()
            if count == 0:
                continue
            if not shape:
                piece.data.copy_(opened.get_tensor(piece.name).view(1))
                continue
            row = max(1, torch.Size(shape[1:]).numel())
            first, last = piece.start // row, -(-(piece.start + count) // row)
            rows = stored[first:last].reshape(-1)
            offset = piece.start - first * row
            piece.data.copy_(rows[offset : offset + count])


def copy_overlap(piece: Piece, stored: Tensor, start: int) -> None:
    low = max(piece.start, start)
    high = min(piece.start + piece.data.numel(), start + stored.numel())
    target = piece.data[low - piece.start : high - piece.start]
    target.copy_(stored[low - start : high - start])


def write_file(path: Path, pieces: list[Piece]) -> list[dict[str, Any]]:
    """Write one rank's pieces; what the index must know of them."""
    tensors, manifest = {}, []
    for piece in pieces:
        data = piece.data.detach().cpu().contiguous()
        if data.numel() == 0:
            continue
        tensors[f"{piece.name}@{piece.start}"] = data.clone()
        manifest.append(
            {
                "name": piece.name,
                "shape": list(piece.shape),
                "dtype": str(data.dtype).removeprefix("torch."),
                "start": piece.start,
                "stop": piece.start + data.numel(),
                "file": path.name,
                "checksum": crc(data),
            }
        )
    save_file(tensors, path)
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    manifest.append({"file": path.name, "bytes": path.stat().st_size})
    return manifest


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
        tensor["pieces"].append(
            [entry["start"], entry["stop"], entry["file"], entry["checksum"]]
        )
    for name, tensor in tensors.items():
        end = 0
        for start, stop, *_ in sorted(tensor["pieces"]):
            if start > end:
                raise CheckpointError(f"{name}: elements {end} to {start} are missing")
            end = max(end, stop)
        if end != torch.Size(tensor["shape"]).numel():
            raise CheckpointError(f"{name}: elements from {end} on are missing")
    return {
        "format": FORMAT,
        "step": step,
        "world_size": len(manifests),
        "extra": extra,
        "tensors": tensors,
        "files": files,
    }


def agree(values: list[Any], group: ProcessGroup | None) -> list[Any]:
    """Rank 0's values on every rank."""
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values


def crc(data: Tensor) -> int:
    return zlib.crc32(data.contiguous().view(torch.uint8).numpy().data)


def write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
