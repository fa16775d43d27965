"""A file of token ids that is mapped into memory, not read: any size opens at once.

    0        header, 64 bytes: magic, version, bytes of an id, size of the vocabulary,
             numbers of ids and of documents, a checksum of them, one of the header
    64       ids, one document after the other: uint8, uint16 or int32
    ..       document i has ids offsets[i] to offsets[i + 1]: int64, documents + 1

All numbers are little-endian; zeros fill up to a multiple of 8 bytes. An id takes 1, 2
or 4 bytes, as the vocabulary needs, and a document 8. All ranks of a host map the same
file: the system reads what is asked for and keeps it once. `writing` writes such files.
"""

import mmap
import os
import struct
import warnings
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

MAGIC, VERSION = b"xtraintk", 1
NUMBERS = struct.Struct("<8sIIQQQI")
CHECKSUM = struct.Struct("<I")
START = 64  # of the ids
DTYPES = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}
MOST_IDS = 2**31
AT_ONCE = 2**20  # ids or bytes


@dataclass(frozen=True, eq=False)
class TokenFile:
    """A file of tokens that `open` has mapped.

    Attributes:
        tokens: all ids: uint8, uint16 or int32, mapped for reading only.
        offsets: where each document begins, and where the last one ends; int64.
        checksum: of ids and offsets, as the header has it.
    """

    path: Path
    vocab_size: int
    tokens: Tensor
    offsets: Tensor
    checksum: int

    @staticmethod
    def open(path: str | Path) -> "TokenFile":
        """Map a file. Its ids are looked at when they are read.

        Raises:
            ValueError: there is no such file, or header, size or offsets show that it
                is damaged or cut.
        """
        path = Path(path)
        if not path.is_file():
            raise ValueError(f"{path}: no such file found, a file of tokens wanted")
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size < START:
                raise ValueError(f"{path}: {size} bytes found, a header wants {START}")
            mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        width, vocab_size, tokens, documents, checksum = parsed(path, mapped[:START])
        offsets_at = aligned(START + tokens * width)
        wanted = offsets_at + 8 * (documents + 1)
        if size != wanted:
            raise ValueError(
                f"{path} is cut or damaged: {size} bytes found, {wanted} wanted for "
                f"{tokens} tokens and {documents} documents"
            )
        ids = view(mapped, DTYPES[width], tokens, START)
        offsets = view(mapped, torch.int64, documents + 1, offsets_at)
        ends = [int(offsets[0]), int(offsets[-1])]
        if ends != [0, tokens] or (offsets[1:] < offsets[:-1]).any():
            raise ValueError(
                f"{path} is damaged: offsets of documents found from {ends[0]} to "
                f"{ends[1]}, rising ones from 0 to {tokens} wanted"
            )
        return TokenFile(path, vocab_size, ids, offsets, checksum)

    def read(self, start: int, stop: int) -> Tensor:
        """Copy ids start to stop, int64; ValueError if one is not of the vocabulary."""
        if not 0 <= start <= stop <= len(self.tokens):
            raise ValueError(
                f"{self.path}: tokens {start} to {stop} wanted of {len(self.tokens)}"
            )
        ids = self.tokens[start:stop].to(torch.int64)
        wrong = first_wrong(ids, self.vocab_size)
        if wrong is not None:
            raise ValueError(
                f"{self.path} is damaged: id {int(ids[wrong])} found at token "
                f"{start + wrong}, ids 0 to {self.vocab_size - 1} wanted"
            )
        return ids

    def check(self) -> None:
        """Read everything; ValueError unless all ids and the checksum are right."""
        total, found = len(self.tokens), 0
        for start in range(0, total, AT_ONCE):
            self.read(start, min(start + AT_ONCE, total))
        with self.path.open("rb") as file:
            file.seek(START)
            while data := file.read(AT_ONCE):
                found = zlib.crc32(data, found)
        if found != self.checksum:
            raise ValueError(
                f"{self.path} is damaged: checksum {found:08x} found, "
                f"{self.checksum:08x} wanted"
            )


def parsed(path: Path, header: bytes) -> tuple[int, int, int, int, int]:
    """Bytes of an id, size of the vocabulary, ids, documents, and their checksum."""
    magic, version, *numbers = NUMBERS.unpack_from(header)
    if magic != MAGIC:
        raise ValueError(f"{path}: {magic!r} found, a file of tokens has {MAGIC!r}")
    if version != VERSION:
        raise ValueError(f"{path}: version {version} found, {VERSION} wanted")
    (wanted,) = CHECKSUM.unpack_from(header, NUMBERS.size)
    found = zlib.crc32(header[: NUMBERS.size])
    if found != wanted:
        raise ValueError(
            f"{path}: its header is damaged: checksum {found:08x} found, "
            f"{wanted:08x} wanted"
        )
    width, vocab_size, tokens, documents, checksum = numbers
    return width, vocab_size, tokens, documents, checksum


def aligned(position: int) -> int:
    """The next multiple of 8."""
    return -(-position // 8) * 8


def view(mapped: mmap.mmap, dtype: torch.dtype, count: int, offset: int) -> Tensor:
    """A part of the mapped file as a tensor, which keeps the file mapped."""
    if count == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    with warnings.catch_warnings():  # that the tensor may not be written to
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(mapped, dtype=dtype, count=count, offset=offset)


def first_wrong(ids: Tensor, vocab_size: int) -> int | None:
    """Where the first id stands that is not of the vocabulary."""
    if len(ids) == 0:
        return None
    low, high = ids.aminmax()
    if low >= 0 and high < vocab_size:
        return None
    return int(((ids < 0) | (ids >= vocab_size)).nonzero()[0])
