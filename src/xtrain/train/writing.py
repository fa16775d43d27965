"""Write a file of tokens, one document at a time.

    documents -> .NAME.<8 hex>.partial -> checksums, fsync -> moved to NAME in one step

A reader finds a whole file or none, and those who have an older one of this name open
keep it. Several processes may write the same name at once: the last one's file stays.
Memory: one document, and 8 bytes for each of all.
"""

import os
import secrets
import zlib
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from xtrain.train.tokens import (
    CHECKSUM,
    DTYPES,
    MAGIC,
    MOST_IDS,
    NUMBERS,
    START,
    VERSION,
    aligned,
    first_wrong,
)

Document = Tensor | Sequence[int]


def write_tokens(
    path: str | Path, documents: Iterable[Document], vocab_size: int
) -> Path:
    """Write documents to a file and publish it when it is complete.

    Args:
        documents: each the ids of one, [tokens], of any integer dtype; they may be
            empty.

    Raises:
        ValueError: something is not a list of ids from 0 to vocab_size - 1. Then an
            older file of this name stays.
    """
    if not 0 < vocab_size <= MOST_IDS:
        raise ValueError(f"vocab_size {vocab_size} is not from 1 to {MOST_IDS}")
    path = Path(path)
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        with partial.open("xb") as file:
            write_to(file, documents, vocab_size)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return path


def write_to(file: BinaryIO, documents: Iterable[Document], vocab_size: int) -> None:
    """The header comes last: until then the file is none."""
    width = 1 if vocab_size <= 2**8 else 2 if vocab_size <= 2**16 else 4
    file.write(bytes(START))
    offsets, checksum = array("q", [0]), 0
    for number, document in enumerate(documents):
        ids = checked(document, number, vocab_size)
        data = bytearray(len(ids) * width)
        if data:
            torch.frombuffer(data, dtype=DTYPES[width]).copy_(ids)
        file.write(data)
        checksum = zlib.crc32(data, checksum)
        offsets.append(offsets[-1] + len(ids))
    end = START + offsets[-1] * width
    tail = bytes(aligned(end) - end) + offsets.tobytes()
    file.write(tail)
    sizes = offsets[-1], len(offsets) - 1, zlib.crc32(tail, checksum)
    header = NUMBERS.pack(MAGIC, VERSION, width, vocab_size, *sizes)
    file.seek(0)
    file.write(header + CHECKSUM.pack(zlib.crc32(header)))


def checked(document: Document, number: int, vocab_size: int) -> Tensor:
    """A document's ids, int64, [tokens]."""
    try:
        given = document if isinstance(document, Tensor) else list(document)
        ids = torch.as_tensor(given, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"document {number} is not a list of ids: {error}") from None
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() != 1 or not (whole or len(ids) == 0):
        raise ValueError(
            f"document {number} has shape {list(ids.shape)} and {ids.dtype}, integers "
            "[tokens] wanted"
        )
    ids = ids.to(torch.int64)
    wrong = first_wrong(ids, vocab_size)
    if wrong is not None:
        raise ValueError(
            f"document {number} has id {int(ids[wrong])} at token {wrong}, ids 0 to "
            f"{vocab_size - 1} wanted"
        )
    return ids
