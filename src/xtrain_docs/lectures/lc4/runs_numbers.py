"""Functions that run on every rank: single numbers of a lookup, the loss and RoPE."""

from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from xtrain.model import RopeScaling
from xtrain.tensor_parallel import (
    VocabParallelEmbedding,
    embedding,
    vocab_parallel_cross_entropy,
)
from xtrain.tensor_parallel.rope import scale_frequencies


def embedding_parts(ids: list[int], vocabulary: int) -> dict[str, list[float]]:
    """What a rank looks up of a table whose row i is i + 1, and the sum over ranks."""
    full = torch.arange(1.0, vocabulary + 1).unsqueeze(-1)
    layer = VocabParallelEmbedding.from_full(full)
    found = {"rows": layer.weight.flatten().tolist()}
    total = embedding.all_reduce_identity

    def spied(partial: Tensor, group: Any) -> Tensor:
        found["partial"] = partial.flatten().tolist()
        return total(partial, group)

    with mock.patch.object(embedding, "all_reduce_identity", spied):
        found["sum"] = layer(torch.tensor([ids])).flatten().tolist()
    return found


def loss_parts(logits: list[list[float]], labels: list[int]) -> dict[str, Any]:
    """What a rank puts into each all-reduce of the loss, and gets out of it."""
    whole = torch.tensor(logits, dtype=torch.float64)
    local = whole.chunk(dist.get_world_size(), -1)[dist.get_rank()]
    found: dict[str, Any] = {"logits": local.tolist(), "calls": []}
    total = dist.all_reduce

    def spied(numbers: Tensor, *args: Any, **options: Any) -> None:
        before = numbers.tolist()
        total(numbers, *args, **options)
        found["calls"].append([before, numbers.tolist()])

    with mock.patch.object(dist, "all_reduce", spied):
        losses = vocab_parallel_cross_entropy(
            local, torch.tensor(labels), reduction="none"
        )
    return {**found, "losses": losses.tolist()}


def big_logits(scale: float, first_shard_only: bool) -> list[float]:
    """One process's loss, ours, and one whose exponentials have no maximum taken off.

    The last is every rank's own number, as is its label's logit.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(0)
    logits = torch.randn(6, 4 * ranks) * scale
    labels = torch.randint(0, 4 if first_shard_only else 4 * ranks, (6,))
    local = logits.chunk(ranks, -1)[rank]
    right = nn.functional.cross_entropy(logits.double(), labels)
    ours = vocab_parallel_cross_entropy(local, labels)
    sums = local.exp().sum(-1)
    dist.all_reduce(sums)
    naive = (sums.log() - logits.gather(-1, labels.unsqueeze(-1)).squeeze()).mean()
    return [right.item(), ours.item(), naive.item()]


def rope_slowdown(least: int, most: int, steps: int) -> list[list[float]]:
    """[turns in the original length, times slower] of pairs under Llama 3.1's scaling.

    Args:
        least: turns of the slowest pair, as a power of 2; likewise `most`.
        steps: how many pairs for each power of 2.
    """
    scaling = RopeScaling()
    numbers = torch.arange(least * steps, most * steps + 1, dtype=torch.float64)
    turns = 2 ** (numbers / steps)
    frequencies = turns * 2 * torch.pi / scaling.original_max_position_embeddings
    slower = frequencies / scale_frequencies(frequencies, scaling)
    return torch.stack([turns, slower], -1).tolist()
