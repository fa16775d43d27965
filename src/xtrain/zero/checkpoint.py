"""Sharded checkpoints: each rank writes its own pieces, any number of ranks reads them.

    run/
      latest                        the name of the newest complete checkpoint
      step-00000020/
        index.json                  every tensor: shape, dtype, which piece lies where
        rank-00000.safetensors      this rank's pieces, flat
        rank-00001.safetensors

A piece is a range of a flattened tensor. A rank that loads asks for the ranges it needs
and reads only the pieces that overlap them, so the world size may change, and nobody
ever holds a whole model.

A checkpoint is written beside its place, checked, and moved there in one step: a run
that dies while saving leaves the one before untouched. Every piece has a checksum, and
all are looked at before the first byte of a live model changes.
"""

import json
import os
import secrets
import shutil
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

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


class Stored(NamedTuple):
    """A piece in a file of a checkpoint."""

    file: str
    name: str
    start: int
    stop: int
    checksum: int


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
    check_step(step, group)
    plan = prepare(directory, step) if rank == 0 else None
    final, partial, problem = agree(plan, group)
    if problem:
        raise CheckpointError(problem)
    manifest = None
    try:
        partial.mkdir(parents=True, exist_ok=True)
        manifest = write_file(partial / f"rank-{rank:05d}.safetensors", pieces)
    except Exception as error:  # whatever it is, the others must hear of it
        problem = f"rank {rank}: {error}"
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, (manifest, problem), group=group)
    problems = [p for _, p in gathered if p is not None]
    if rank == 0:
        try:
            if not problems:
                index = make_index(step, extra, [m for m, _ in gathered])
                publish(index, partial, final)
        except Exception as error:
            problems = [f"rank 0: {error}"]
        shutil.rmtree(partial, ignore_errors=True)
    problems = agree(problems, group)
    if problems:
        raise CheckpointError(f"{final} was not saved: {'; '.join(problems)}")
    return final


def check_step(step: int, group: ProcessGroup | None) -> None:
    """ValueError on every rank unless all save the same step, 0 or more."""
    steps: list[Any] = [None] * rank_and_size(group)[1]
    dist.all_gather_object(steps, step, group=group)
    for rank, other in enumerate(steps):
        if not isinstance(other, int) or other < 0 or other != steps[0]:
            raise ValueError(
                f"step={other!r} on rank {rank}, {steps[0]!r} on rank 0: it must be "
                "the same integer on every rank, not below 0"
            )


def prepare(directory: Path, step: int) -> tuple[Path, Path, str | None]:
    """Where the checkpoint will stand, where it is written, and what is wrong."""
    token = secrets.token_hex(4)
    final = directory / f"step-{step:08d}"
    partial = directory / f".partial-{final.name}-{token}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        for leftover in directory.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        if final.exists():  # a step saved again must not pass through nothing
            final = final.with_name(f"{final.name}-{token}")
        partial.mkdir()
    except OSError as error:
        return final, partial, f"{final} was not saved: rank 0: {error}"
    return final, partial, None


def publish(index: dict[str, Any], partial: Path, final: Path) -> None:
    """Move a complete checkpoint to its place and let `latest` name it."""
    directory = final.parent
    index = json.loads(json.dumps(index))  # as a reader will see it
    index["checksum"] = checksum_of(index)
    write_text(partial / "index.json", json.dumps(index, indent=1))
    sync_directory(partial)
    os.rename(partial, final)
    pointer = directory / f".latest-{secrets.token_hex(4)}"
    write_text(pointer, final.name)
    os.replace(pointer, directory / "latest")
    sync_directory(directory)
    step = final.name[: len("step-00000000")]
    for older in directory.glob(f"{step}*"):
        if older != final and older.name.partition(step)[2][:1] in ("", "-"):
            shutil.rmtree(older, ignore_errors=True)


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
        except ValueError as error:  # bytes that are no text, or text that is no JSON
            raise CheckpointError(f"{path}/index.json is damaged: {error}") from None
        found = self.index.get("format") if isinstance(self.index, dict) else None
        if found != FORMAT:
            raise CheckpointError(f"{path} has format {found}, this reads {FORMAT}")
        self.checksum: int = self.index.pop("checksum", None)
        if self.checksum != checksum_of(self.index):
            raise CheckpointError(
                f"{path}/index.json is damaged: it does not match its checksum"
            )
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

    def check(self, wanted: list[Piece], ignore: str = "") -> None:
        """CheckpointError naming every tensor missing, extra or of another shape.

        Tensors of the checkpoint whose names begin with `ignore` need no taker.
        """
        problems = compare(
            {p.name: tuple(p.shape) for p in wanted if torch.Size(p.shape).numel()},
            {
                name: tuple(entry["shape"])
                for name, entry in self.tensors.items()
                if not (ignore and name.startswith(ignore))
            },
        )
        if problems:
            raise CheckpointError(f"{self.path} is of another model:{problems}")

    def verify(self, wanted: list[Piece], rank: int = 0, size: int = 1) -> None:
        """CheckpointError if a stored piece is damaged; nothing is changed.

        A rank looks at every piece that it is going to read, and at one in `size` of
        all the others: together they see every piece of every file.
        """
        everything = {
            Stored(file, name, start, stop, checksum)
            for name, entry in self.tensors.items()
            for start, stop, file, checksum in entry["pieces"]
        }
        needed = {stored for piece in wanted for stored in self.overlapping(piece)}
        share = sorted(everything - needed)[rank::size]
        for _ in self.load(needed.union(share)):
            pass

    @torch.no_grad()
    def read(self, wanted: list[Piece]) -> None:
        """Fill the wanted pieces' `data`, reading only what overlaps them."""
        takers: dict[Stored, list[Piece]] = {}
        for piece in wanted:
            for stored in self.overlapping(piece):
                takers.setdefault(stored, []).append(piece)
        for stored, data in self.load(takers):
            for piece in takers[stored]:
                copy_overlap(piece, data, stored.start)

    def overlapping(self, piece: Piece) -> Iterator[Stored]:
        """The stored pieces that have elements of a wanted one."""
        if piece.data.numel() == 0:  # a tensor without elements is in no file
            return
        for start, stop, file, checksum in self.tensors[piece.name]["pieces"]:
            if max(start, piece.start) < min(stop, piece.start + piece.data.numel()):
                yield Stored(file, piece.name, start, stop, checksum)

    def load(self, pieces: Iterable[Stored]) -> Iterator[tuple[Stored, Tensor]]:
        """Stored pieces with their data, file by file; CheckpointError at a damaged."""
        for file, members in groupby(sorted(pieces), lambda stored: stored.file):
            path = self.path / file
            try:
                with safe_open(path, framework="pt") as opened:
                    for stored in members:
                        data = opened.get_tensor(f"{stored.name}@{stored.start}")
                        self.check_data(path, stored, data)
                        yield stored, data
            except (SafetensorError, OSError) as error:
                raise CheckpointError(f"{path} is damaged: {error}") from None

    def check_data(self, path: Path, stored: Stored, data: Tensor) -> None:
        """CheckpointError unless the data are what the index says was written."""
        what = f"{stored.name}, elements {stored.start} to {stored.stop}"
        dtype = str(data.dtype).removeprefix("torch.")
        if dtype != self.tensors[stored.name]["dtype"]:
            raise CheckpointError(f"{path} is damaged: {what}: dtype {dtype}")
        if data.numel() != stored.stop - stored.start or crc(data) != stored.checksum:
            raise CheckpointError(f"{path} is damaged: {what}: wrong checksum")


@torch.no_grad()
def read_safetensors(path: str | Path, wanted: list[tuple[Piece, set[str]]]) -> None:
    """Fill pieces from a bare model's safetensors file, reading their ranges only.

    Args:
        wanted: pieces, each with all names under which the file may have it: of tied
            tensors a file often has one.
    """
    try:
        with safe_open(path, framework="pt") as opened:
            shapes = {
                name: tuple(opened.get_slice(name).get_shape())
                for name in opened.keys()  # noqa: SIM118 (it is no mapping)
            }
            needed, found = {}, {}
            for piece, names in wanted:
                found[piece.name] = next((n for n in names if n in shapes), "")
                needed[found[piece.name] or piece.name] = tuple(piece.shape)
            known = set().union(*(names for _, names in wanted))
            spare = {n for n in shapes if n in known and n not in needed}
            problems = compare(
                needed, {n: shape for n, shape in shapes.items() if n not in spare}
            )
            if problems:
                raise CheckpointError(f"{path} is of another model:{problems}")
            for piece, _ in wanted:
                if piece.data.numel():
                    read_range(opened, found[piece.name], piece)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None


def read_range(opened: Any, name: str, piece: Piece) -> None:
    """Read a piece's elements, and of a matrix the rest of its first and last row."""
    if not piece.shape:
        piece.data.copy_(opened.get_tensor(name).view(1))
        return
    stop = piece.start + piece.data.numel()
    row = torch.Size(piece.shape[1:]).numel()
    first, last = piece.start // row, -(-stop // row)
    rows = opened.get_slice(name)[first:last].reshape(-1)
    piece.data.copy_(rows[piece.start - first * row : stop - first * row])


def compare(here: dict[str, tuple[int, ...]], there: dict[str, tuple[int, ...]]) -> str:
    """A line for each tensor that only one side has or that has two shapes."""
    lines = []
    for name in sorted({*here, *there}):
        mine, stored = here.get(name), there.get(name)
        if stored is None:
            lines.append(f"{name}: not in the checkpoint, {list(mine or ())} here")
        elif mine is None:
            lines.append(f"{name}: {list(stored)} in the checkpoint, not here")
        elif mine != stored:
            lines.append(f"{name}: {list(stored)} in the checkpoint, {list(mine)} here")
    return "".join(f"\n  {line}" for line in lines)


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
        for key in ("shape", "dtype"):
            if tensor[key] != entry[key]:
                raise CheckpointError(
                    f"{entry['name']}: {key} {tensor[key]} and {entry[key]} on "
                    "different ranks"
                )
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


def agree(value: Any, group: ProcessGroup | None) -> Any:
    """Rank 0's value on every rank."""
    values = [value]
    dist.broadcast_object_list(values, group=group, group_src=0)
    return values[0]


def checksum_of(index: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(index, sort_keys=True).encode())


def sync_directory(path: Path) -> None:
    """Have the names in a directory on disk, not only the files' contents."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def crc(data: Tensor) -> int:
    return zlib.crc32(data.contiguous().view(torch.uint8).numpy().data)


def write_text(path: Path, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
