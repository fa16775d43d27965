"""Read a checkpoint: any boxes of its tensors, of any number of ranks' files."""

import math
import os
import weakref
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from xtrain.checkpoint.boxes import overlap
from xtrain.checkpoint.errors import CheckpointError
from xtrain.checkpoint.folder import INDEX, latest
from xtrain.checkpoint.index import compare, crc, parse_index
from xtrain.checkpoint.locks import hold, is_at, replaced
from xtrain.checkpoint.pieces import About, Piece
from xtrain.checkpoint.structure import Stored, dtype_named, stored_pieces


class CheckpointReader:
    """A checkpoint's index, and boxes of its tensors on demand.

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
            self._pieces = {n: stored_pieces(self.index, n) for n in self.tensors}
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

    def check(self, wanted: dict[str, About], ignore: str = "") -> None:
        """CheckpointError naming every tensor missing, extra or of another kind.

        Tensors of the checkpoint whose names begin with `ignore` need no taker, and
        those without elements are in no checkpoint.
        """
        problems = compare(
            {name: about for name, about in wanted.items() if math.prod(about.shape)},
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
        everything = {stored for found in self._pieces.values() for stored in found}
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
                copy_overlap(piece, stored, data)

    def stored(self, name: str) -> list[Stored]:
        """A tensor's pieces."""
        if name not in self._pieces:
            raise CheckpointError(f"{self.path} has no {name}")
        return self._pieces[name]

    def overlapping(self, piece: Piece) -> Iterator[Stored]:
        """The stored pieces that have elements of a wanted one."""
        if piece.data.numel() == 0:  # a tensor without elements is in no file
            return
        for stored in self.stored(piece.name):
            if any(overlap(piece.box, box) for box in stored.boxes):
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
            except Exception as error:  # a damaged header raises many kinds
                raise self._damaged(path, str(error)) from None

    def check_data(self, path: Path, stored: Stored, data: Tensor) -> None:
        """CheckpointError unless the data are those that the index lists."""
        what = f"{stored.name}, {stored.where}"
        dtype = str(data.dtype).removeprefix("torch.")
        if dtype != self.tensors[stored.name]["dtype"]:
            raise self._damaged(path, f"{what}: dtype {dtype}")
        if data.shape != stored.shape:
            raise self._damaged(path, f"{what}: shape {list(data.shape)} in the file")
        if crc(data) != stored.checksum:
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
    """A checkpoint, or a run's newest and its name, also while another job saves."""
    while True:
        newest = latest(path)
        try:
            return CheckpointReader(newest or path), newest.name if newest else None
        except CheckpointError:
            if newest is None or latest(path) == newest:
                raise


def open_same(path: str | Path, name: str | None) -> CheckpointReader:
    """What rank 0 has opened as `name`, where this rank finds it too.

    Also on a file system that still shows this rank an older `latest`. Where rank 0's
    is missing, this rank opens its own newest, and the comparison raises.
    """
    if name is not None and (Path(path) / name / INDEX).exists():
        return CheckpointReader(Path(path) / name)
    return CheckpointReader(latest(path) or path)


def copy_overlap(piece: Piece, stored: Stored, data: Tensor) -> None:
    """Fill a wanted piece with what a stored one has of it."""
    parts = data.reshape(-1).split([box.numel for box in stored.boxes])
    for box, part in zip(stored.boxes, parts, strict=True):
        if common := overlap(piece.box, box):
            source = part.view(box.size)[common.slices_in(box)]
            piece.data[common.slices_in(piece.box)].copy_(source)
