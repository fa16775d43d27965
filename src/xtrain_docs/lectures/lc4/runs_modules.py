"""Functions that run on every rank for the pages on the modules of lc4."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import xtrain.backends  # noqa: F401 - registers xtrain-socket
from xtrain.comm import CommLedger
from xtrain.comm.autograd import all_gather_split
from xtrain.model import RopeScaling, XtrainConfig
from xtrain.model.attention import Attention
from xtrain.tensor_parallel import (
    AllGatherMLP,
    HiddenParallelEmbedding,
    ParallelAttention,
    ParallelRMSNorm,
    ParallelSwiGLU,
    VocabParallelEmbedding,
    embedding,
    vocab_parallel_cross_entropy,
)
from xtrain.tensor_parallel.attention import replica_ranks
from xtrain.tensor_parallel.rope import scale_frequencies

BATCH, SEQUENCE, HIDDEN, INNER = 2, 96, 96, 384
HEADS, HEAD_DIM, VOCABULARY, TOKENS = 24, 4, 24, 17_280
"""Sums of activations, and of one number a token, are large enough for our socket
backend's all-reduce to go round a ring, and not straight to every rank."""

Forward = Callable[[Tensor], Tensor]


# ------------------------------------------------------------------ what is sent


@contextmanager
def counted_group() -> Iterator[ProcessGroup]:
    """All ranks over our socket backend, which tells a ledger every byte."""
    group = dist.new_group(backend="xtrain-socket")
    try:
        yield group
    finally:
        dist.destroy_process_group(group)


def calls(module: str, key_heads: int = HEADS) -> list[list[Any]]:
    """[phase, call, bytes of its tensor here, bytes sent] of forward and backward.

    Args:
        module: a name of `FORWARDS`; with " sp" behind it on slices of the sequence.
        key_heads: of attention.
    """
    name, split = module.removesuffix(" sp"), module.endswith(" sp")
    ranks = dist.get_world_size()
    with counted_group() as group:
        forward = FORWARDS[name](group, split, key_heads)
        x = torch.ones(BATCH, SEQUENCE // ranks if split else SEQUENCE, HIDDEN)
        found = []
        with CommLedger() as ledger:
            y = forward(x.requires_grad_())
        found += [["forward", *numbers(event)] for event in ledger.events]
        with CommLedger() as ledger:
            y.sum().backward()
        found += [["backward", *numbers(event)] for event in ledger.events]
    return [call for call in found if call[1] != "recv"]


def numbers(event: Any) -> list[Any]:
    return [event.op.strip("_"), event.payload, event.nbytes]


def swiglu(group: ProcessGroup, split: bool, _: int) -> Forward:
    return ParallelSwiGLU(HIDDEN, INNER, sequence_parallel=split, group=group)


def attention(group: ProcessGroup, split: bool, key_heads: int) -> Forward:
    return ParallelAttention(
        HIDDEN, HEADS, key_heads, HEAD_DIM, sequence_parallel=split, group=group
    )


def column_only(group: ProcessGroup, split: bool, _: int) -> Forward:
    return AllGatherMLP(HIDDEN, INNER, bias=False, group=group)


def norm(group: ProcessGroup, split: bool, _: int) -> Forward:
    return ParallelRMSNorm(HIDDEN, sequence_parallel=split, group=group)


def rows(group: ProcessGroup, split: bool, _: int) -> Forward:
    layer = VocabParallelEmbedding(
        VOCABULARY, HIDDEN, sequence_parallel=split, group=group
    )
    return lambda x: layer(torch.ones(BATCH, SEQUENCE, dtype=torch.long))


def columns(group: ProcessGroup, split: bool, _: int) -> Forward:
    layer = HiddenParallelEmbedding(VOCABULARY, HIDDEN, group=group)
    return lambda x: layer(torch.ones(BATCH, SEQUENCE, dtype=torch.long))


def loss_of(gathered: bool) -> Callable[[ProcessGroup, bool, int], Forward]:
    def build(group: ProcessGroup, split: bool, _: int) -> Forward:
        local = torch.ones(TOKENS, VOCABULARY // group.size(), requires_grad=True)
        labels = torch.arange(TOKENS) % VOCABULARY
        if gathered:
            return lambda x: nn.functional.cross_entropy(
                all_gather_split(local, -1, group), labels
            )
        return lambda x: vocab_parallel_cross_entropy(local, labels, group=group)

    return build


FORWARDS = {
    "attention": attention,
    "swiglu": swiglu,
    "column only": column_only,
    "norm": norm,
    "vocabulary": rows,
    "hidden": columns,
    "loss": loss_of(False),
    "gathered loss": loss_of(True),
}


# ------------------------------------------------------------------ who holds what


def whole_attention(heads: int, key_heads: int, hidden: int = 6) -> Attention:
    config = XtrainConfig(
        vocab_size=1,
        hidden_size=hidden,
        intermediate_size=1,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        head_dim=4,
    )
    return Attention(config).double()


@torch.no_grad()
def heads_held(heads: int, key_heads: int) -> dict[str, list[int]]:
    """The query, key and value heads in this rank's weights, and who shares them."""
    whole = whole_attention(heads, key_heads)
    for layer in (whole.q_proj, whole.k_proj, whole.v_proj):
        number = torch.arange(len(layer.weight)) // 4  # every row says whose it is
        layer.weight.copy_(number.unsqueeze(-1).expand_as(layer.weight))
    block = ParallelAttention.from_full(whole, head_dim=4)
    held = {
        name: block.get_parameter(f"{name}_proj.weight")[::4, 0].int().tolist()
        for name in "qkv"
    }
    return {**held, "with": replica_ranks(key_heads)}


def shares_of_key_gradient(heads: int, key_heads: int) -> dict[str, float]:
    """How much of the key weight's true gradient this rank has: alone, and summed.

    A share is the inner product with the true gradient over that one's square, so the
    shares of parts that add up to it are 1 together.
    """
    torch.manual_seed(0)
    whole = whole_attention(heads, key_heads)
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    whole(x, torch.arange(5)).square().sum().backward()
    assert whole.k_proj.weight.grad is not None
    ranks = dist.get_world_size()
    replicas = ranks // key_heads
    true = whole.k_proj.weight.grad.chunk(key_heads)[dist.get_rank() // replicas]
    found = {}
    for what, together in (("alone", False), ("summed", True)):
        block = ParallelAttention.from_full(whole, head_dim=4)
        if not together:
            block.replicas = 1  # leaves out the sum among replicas
        block(x).square().sum().backward()
        mine = block.k_proj.weight.grad
        assert mine is not None
        found[what] = ((mine * true).sum() / true.square().sum()).item()
        found[f"{what}, error"] = ((mine - true).norm() / true.norm()).item()
    return found


# ------------------------------------------------------------------ single numbers


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
