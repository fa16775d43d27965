"""Functions that run on every rank: what the modules of lc4 call and send."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

import xtrain.backends  # noqa: F401 - registers xtrain-socket
from xtrain.comm import CommLedger
from xtrain.comm.autograd import all_gather_split
from xtrain.tensor_parallel import (
    AllGatherMLP,
    HiddenParallelEmbedding,
    ParallelAttention,
    ParallelRMSNorm,
    ParallelSwiGLU,
    VocabParallelEmbedding,
    vocab_parallel_cross_entropy,
)

BATCH, SEQUENCE, HIDDEN, INNER = 2, 96, 96, 384
HEADS, HEAD_DIM, VOCABULARY, TOKENS = 24, 4, 24, 17_280
"""Sums of activations, and of one number a token, are large enough for our socket
backend's all-reduce to go round a ring, and not straight to every rank."""

Forward = Callable[[Tensor], Tensor]


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
