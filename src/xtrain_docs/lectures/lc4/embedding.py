"""The page on embeddings: a vocabulary-parallel lookup."""

from collections.abc import Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from xtrain.tensor_parallel import VocabParallelEmbedding, embedding

from ... import runs
from ...figures import REGISTRY
from ...svg import cell, document, text

WIDTH, EDGE, LEFT, HIGH = 400, 394, 150, 32
IDS, VOCABULARY, RANKS = (0, 3, 4, 7, 4), 8, 2


def looked_up() -> tuple[list[int], list[int]]:
    """What this rank looks up of a table whose row i is i + 1, and the sum of all."""
    full = torch.arange(1.0, VOCABULARY + 1).unsqueeze(-1)
    layer, seen = VocabParallelEmbedding.from_full(full), []
    total = embedding.all_reduce_identity

    def spied(partial: Tensor, group: Any) -> Tensor:
        seen.append(partial.clone())
        return total(partial, group)

    with mock.patch.object(embedding, "all_reduce_identity", spied):
        whole = layer(torch.tensor([IDS]))
    here, everywhere = (x.flatten().int().tolist() for x in (*seen, whole))
    return here, everywhere


@REGISTRY
def embedding_lookup() -> str:
    """Each rank's rows, what it looks up, and the sum of all ranks."""
    found, rows = runs.remembered(looked_up, RANKS), VOCABULARY // RANKS
    parts = [text(6, 20, "ids, on every rank", "xt-label")]
    parts += row(4, [(None, str(number)) for number in IDS])
    y, owners = 4.0 + HIGH, [0] * len(IDS)
    for rank, (here, _) in enumerate(found):
        words = f"rank {rank}, rows {rank * rows} to {rank * rows + rows - 1}"
        parts.append(text(6, y + 16.5, words, "xt-tick"))
        parts += row(y, [(rank, f"row {v - 1}") if v else (None, "0") for v in here])
        owners = [rank if v else was for v, was in zip(here, owners, strict=True)]
        y += HIGH
    parts.append(text(6, y + 16.5, "sum, on every rank", "xt-label"))
    sums = [f"row {v - 1}" for v in found[0][1]]
    parts += row(y, list(zip(owners, sums, strict=True)))
    said = "; ".join(f"id {n} is looked up by one rank" for n in dict.fromkeys(IDS))
    title = "A vocabulary-parallel lookup"
    return document(WIDTH, y + HIGH, parts, title, said)


def row(y: float, cells: Sequence[tuple[int | None, str]]) -> list[str]:
    """A cell for each id: the rank that it is of, and words."""
    wide = (EDGE - LEFT) / len(cells)
    parts = []
    for place, (rank, words) in enumerate(cells):
        parts += cell(LEFT + place * wide, y, wide - 4, 24, rank, words)
    return parts
