"""Read a checkpoint: any ranges of its tensors, of any number of ranks' files."""

import os
import weakref
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from xtrain.checkpoint.folder import INDEX, latest
from xtrain.checkpoint.index import (
    About,
    CheckpointError,
    Piece,
    Stored,
    compare,
    crc,
    dtype_named,
    parse_index,
)
from xtrain.checkpoint.locks import hold, is_at, replaced


class CheckpointReader:
    """A checkpoint's index, and ranges of its tensors on demand.

    While it is open, no save replaces the checkpoint. CheckpointReplaced if it is gone
    all the same.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._index_file = hold(self.path / INDEX)
        self.close = weakref.finalize(self, os.close, self._index_file)
        try:
            with open(self._index_file, "rb", closefd=False) as file:
                self.index = parse_index(file.read(), self.path / INDEX)
            self.checksum: int = self.index["checksum"]
            self.step: int = self.index["step"]
            self.extra: Any = self.index["extra"]
            self.tensors: dict[str, dict[str, Any]] = self.index["tensors"]
            self._keys = self._keys_of_files()
            for name, nbytes in self.index["files"].items():
                self._check_size(self.path / name, nbytes)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check(self, wanted: list[Piece], ignore: str = "") -> None:
        """CheckpointError naming every tensor missing, extra or of another kind.

        Tensors of the checkpoint whose names begin with `ignore` need no taker.
        """
        problems = compare(
            {
                p.name: About(tuple(p.shape), p.data.dtype)
                for p in wanted
                if torch.Size(p.shape).numel()
            },
            {
                name: self.about(name)
                for name in self.tensors
                if not (ignore and name.startswith(ignore))
            },
        )
        if problems:
            raise CheckpointError(f"{self.path} is of another model:{problems}")

    def about(self, name: str) -> About:
        entry = self.tensors[name]
        dtype = dtype_named(entry["dtype"])
        assert dtype is not None
        return About(tuple(entry["shape"]), dtype)

    def verify(self, wanted: list[Piece], rank: int = 0, size: int = 1) -> None:
        """CheckpointError if a stored piece is damaged; nothing is changed.

        A rank looks at every piece that it is going to read, and at one in `size` of
        all the others: together they see every piece of every file.
        """
        everything = {stored for name in self.tensors for stored in self.stored(name)}
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

    def stored(self, name: str) -> Iterator[Stored]:
        """A tensor's pieces."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path} has no {name}")
        for start, stop, file, checksum in self.tensors[name]["pieces"]:
            yield Stored(file, name, start, stop, checksum)

    def overlapping(self, piece: Piece) -> Iterator[Stored]:
        """The stored pieces that have elements of a wanted one."""
        if piece.data.numel() == 0:  # a tensor without elements is in no file
            return
        end = piece.start + piece.data.numel()
        for stored in self.stored(piece.name):
            if max(stored.start, piece.start) < min(stored.stop, end):
                yield stored

    def load(self, pieces: Iterable[Stored]) -> Iterator[tuple[Stored, Tensor]]:
        """Stored pieces with their data, file by file; CheckpointError at a damaged."""
        for file, members in groupby(sorted(pieces), lambda stored: stored.file):
            path = self.path / file
            try:
                with safe_open(path, framework="pt") as opened:
                    if set(opened.keys()) != self._keys[file]:
                        raise self._damaged(path, "it has other tensors")
                    for stored in members:
                        data = opened.get_tensor(stored.key)
                        self.check_data(path, stored, data)
                        yield stored, data
            except CheckpointError:
                raise
            except Exception as error:  # whatever a damaged header leads to
                raise self._damaged(path, str(error)) from None

    def check_data(self, path: Path, stored: Stored, data: Tensor) -> None:
        """CheckpointError unless the data are what the index says was written."""
        what = f"{stored.name}, elements {stored.start} to {stored.stop}"
        dtype = str(data.dtype).removeprefix("torch.")
        if dtype != self.tensors[stored.name]["dtype"]:
            raise self._damaged(path, f"{what}: dtype {dtype}")
        if data.numel() != stored.stop - stored.start or crc(data) != stored.checksum:
            raise self._damaged(path, f"{what}: wrong checksum")

    def _keys_of_files(self) -> dict[str, set[str]]:
        """What each file must have, no more and no less."""
        keys: dict[str, set[str]] = {file: set() for file in self.index["files"]}
        for name in self.tensors:
            for stored in self.stored(name):
                keys[stored.file].add(stored.key)
        return keys

    def _check_size(self, file: Path, nbytes: int) -> None:
        found = file.stat().st_size if file.is_file() else "no file"
        if found != nbytes:
            raise self._damaged(file, f"{nbytes} bytes, {found} found")

    def _damaged(self, file: Path, why: str) -> CheckpointError:
        """What a file's state means: nothing, if the whole checkpoint is gone."""
        if not is_at(self._index_file, self.path / INDEX):
            return replaced(self.path)
        return CheckpointError(f"{file} is damaged: {why}")


def open_newest(path: str | Path) -> tuple[CheckpointReader, str | None]:
    """A checkpoint, or a run's newest and its name, whoever else saves meanwhile."""
    while True:
        newest = latest(path)
        try:
            return CheckpointReader(newest or path), newest.name if newest else None
        except CheckpointError:
            if newest is None or latest(path) == newest:
                raise


def open_same(path: str | Path, name: str | None) -> CheckpointReader:
    """What rank 0 has opened as `name`, where this rank finds it too.

    On a file system that shows it an older `latest`, a rank still opens what rank 0
    has. If it does not find that, it opens what it finds, to be told that it differs.
    """
    if name is not None and (Path(path) / name / INDEX).exists():
        return CheckpointReader(Path(path) / name)
    return CheckpointReader(latest(path) or path)


def copy_overlap(piece: Piece, stored: Tensor, start: int) -> None:
    low = max(piece.start, start)
    high = min(piece.start + piece.data.numel(), start + stored.numel())
    target = piece.data[low - piece.start : high - piece.start]
    target.copy_(stored[low - start : high - start])
