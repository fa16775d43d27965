"""Small files of tokens for tests."""

from collections.abc import Sequence
from pathlib import Path

import torch

from xtrain.train.tokens import TokenFile
from xtrain.train.writing import write_tokens

VOCABULARY = 300


def file_of(
    path: Path, documents: Sequence[Sequence[int]], vocab_size: int = VOCABULARY
) -> TokenFile:
    return TokenFile.open(write_tokens(path, documents, vocab_size))


def documents_of(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of these lengths, whose ids tell them apart."""
    drawn = torch.Generator().manual_seed(sum(lengths))
    return [
        torch.randint(VOCABULARY, (length,), generator=drawn, device="cpu").tolist()
        for length in lengths
    ]
