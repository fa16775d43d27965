"""An endless run's samples by their numbers: the same for any layout and after resume.

    sample i -> epoch i // n, position i % n -> sequence, by a permutation of this epoch
             -> its tokens, labels and documents, [S] each

n is the number of sequences of an epoch (`packing`). The permutation is computed, not
stored: position = l + a r with l < a and r < b, where a is about the square root of n
and a b is n or a little more. Each round of a Feistel network adds a keyed hash of one
half to the other. A result of n or more goes through it again, until one is below n. So
a sample costs the same whatever n and i are: some 20 microseconds for its place, and
the reading of S tokens.

Source: Black & Rogaway, Ciphers with Arbitrary Finite Domains, 2002.
"""

import math
from hashlib import blake2b
from typing import NamedTuple

import torch
from torch import Tensor

from xtrain.train.packing import BestFit, Packing, TokenStream
from xtrain.train.tokens import TokenFile

IGNORED = -100
ROUNDS = 6  # with fewer, some orders of six sequences come more often than others
PACKINGS = ("documents", "stream")


class Sample(NamedTuple):
    """One sequence, int64, [S] each.

    Attributes:
        tokens: 0 where there is padding.
        labels: the next token; -100 where there is none, or one of another document.
        documents: 0, 1, ... within the sample and -1 for padding; None without masks.
    """

    tokens: Tensor
    labels: Tensor
    documents: Tensor | None


class Samples:
    """All samples of an endless run over a file of tokens; `samples[i]` is a Sample.

    Args:
        sequence_length: S.
        seed: of the order.
        packing: "documents", packed whole, or "stream", cut every S tokens.
        shuffle: take each epoch's sequences in an order of its own.
        document_masks: say which token is of which document; labels do not cross
            documents then. For "documents" it is always so.

    Raises:
        ValueError: a value does not fit, or the file has too few tokens.
    """

    def __init__(
        self,
        file: TokenFile,
        sequence_length: int,
        seed: int = 0,
        packing: str = "documents",
        shuffle: bool = True,
        document_masks: bool = False,
    ):
        if sequence_length < 1:
            raise ValueError(f"sequence_length {sequence_length} is less than 1")
        if packing not in PACKINGS:
            raise ValueError(f"packing={packing!r} is not one of {', '.join(PACKINGS)}")
        self.file, self.sequence_length = file, sequence_length
        self.seed, self.shuffle = seed, shuffle
        self.masks = document_masks or packing == "documents"
        try:
            self.packing: Packing = (
                BestFit(file.offsets, sequence_length)
                if packing == "documents"
                else TokenStream(file.offsets, sequence_length, self.masks)
            )
        except ValueError as error:
            raise ValueError(f"{file.path}: {error}") from None

    @property
    def per_epoch(self) -> int:
        """Samples of an epoch."""
        return self.packing.sequences

    @property
    def padding(self) -> float:
        """The fraction of all positions that padding takes."""
        return self.packing.padding

    def identity(self) -> dict[str, object]:
        """What two runs have in common if each sample i is the same in both."""
        return {
            "data checksum": self.file.checksum,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "packing": type(self.packing).__name__,
            "shuffle": self.shuffle,
            "document_masks": self.masks,
        }

    def sequence(self, number: int) -> int:
        """The sequence of the packing that sample `number` is."""
        if number < 0:
            raise ValueError(f"sample {number} is less than 0")
        epoch, position = divmod(number, self.per_epoch)
        if not self.shuffle:
            return position
        return shuffled(position, self.per_epoch, f"{self.seed} {epoch}".encode())

    def __getitem__(self, number: int) -> Sample:
        runs = self.packing.runs(self.sequence(number))
        tokens = torch.zeros(self.sequence_length, dtype=torch.int64, device="cpu")
        labels = torch.full_like(tokens, IGNORED)
        documents = torch.full_like(tokens, -1)
        place = 0
        for document, (start, stop, end) in enumerate(runs):
            ids, size = self.file.read(start, min(stop + 1, end)), stop - start
            tokens[place : place + size] = ids[:size]
            labels[place : place + len(ids) - 1] = ids[1:]
            documents[place : place + size] = document
            place += size
        return Sample(tokens, labels, documents if self.masks else None)


def shuffled(position: int, count: int, key: bytes) -> int:
    """Where a permutation of 0 to count - 1 sends a position; each key has its own."""
    key = blake2b(key, digest_size=32).digest()
    a = math.isqrt(count - 1) + 1
    b = -(-count // a)
    while True:
        right, left = divmod(position, a)
        for number in range(ROUNDS):
            left = (left + hashed(2 * number, right, key)) % a
            right = (right + hashed(2 * number + 1, left, key)) % b
        position = left + a * right
        if position < count:
            return position


def hashed(number: int, value: int, key: bytes) -> int:
    """64 bits of half round `number`."""
    both = number.to_bytes(1, "little") + value.to_bytes(8, "little")
    return int.from_bytes(blake2b(both, digest_size=8, key=key).digest(), "little")
