"""Runs behind the page on online softmax: the states that it really went through."""

import itertools
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.comm import CommLedger
from xtrain.context_parallel import online_softmax as public
from xtrain.context_parallel import ring_online_softmax

module = sys.modules[public.__module__]

SCORES = [[1.0, 0.0, 2.0], [3.0, 1.0, 2.0], [0.0, 4.0, 2.0]]
"""Of one query, in three blocks of keys; each brings a larger score."""
HIDDEN = float("-inf")
ROWS, FEATURES = 6, 8

State = tuple[Tensor, Tensor]


@contextmanager
def recorded() -> Iterator[list[tuple[State | None, State, State]]]:
    """Every `merge` meanwhile: the state before, the block, and the state after."""
    found: list[tuple[State | None, State, State]] = []
    merge = module.merge

    def noting(state: State | None, block: State) -> State:
        after = merge(state, block)
        found.append((state, block, after))
        return after

    with mock.patch.object(module, "merge", noting):
        yield found


def steps() -> list[dict[str, Any]]:
    """The state after each block of SCORES; values are unit vectors.

    So an output says how much each key weighs. A log-sum-exp of nothing is None.
    """
    scores = torch.tensor([list(itertools.chain(*SCORES))], dtype=torch.float64)
    keys = torch.eye(scores.shape[-1], dtype=scores.dtype)
    with recorded() as found:
        public(scores, keys, len(SCORES[0]))
    return [
        {
            "before": None if before is None else before[1].item(),
            "block": block[1].item(),
            "lse": after[1].item(),
            "weights": after[0][0].tolist(),
        }
        for before, block, after in found
    ]


def rows_that_see_little() -> dict[str, list[Any]]:
    """By name of a row: its output from ours, from softmax, and from two other starts.

    None stands for NaN, which JSON lacks.
    """
    low = -2e4
    rows = {
        "sees all keys": [0.0, 1.0, 2.0, 3.0],
        "its first block is hidden": [HIDDEN, HIDDEN, 2.0, 3.0],
        "its last block is hidden": [0.0, 1.0, HIDDEN, HIDDEN],
        "sees no key": [HIDDEN] * 4,
        "all scores are very low": [low, low, low + 1, low + 1],
    }
    values = torch.tensor([[1.0], [2.0], [3.0], [4.0]], dtype=torch.float64)
    found = {}
    for name, row in rows.items():
        scores = torch.tensor([row], dtype=torch.float64)
        output, lse = public(scores, values, 2)
        whole = scores.softmax(-1) @ values
        others = [with_maximum(scores, values, 2, start) for start in (HIDDEN, -1e4)]
        numbers = [x.item() for x in (output, whole, *others, lse)]
        found[name] = [x if x == x and abs(x) < 1e300 else None for x in numbers]
    return found


def with_maximum(scores: Tensor, values: Tensor, size: int, start: float) -> Tensor:
    """The rule as it is often written: a running maximum, and no row without keys."""
    m = torch.full_like(scores[:, :1], start)
    total, output = torch.zeros_like(m), torch.zeros_like(m)
    for s, v in zip(scores.split(size, -1), values.split(size), strict=True):
        largest = torch.maximum(m, s.amax(-1, keepdim=True))
        p, shrink = (s - largest).exp(), (m - largest).exp()
        total = total * shrink + p.sum(-1, keepdim=True)
        output = output * shrink + p @ v
        m = largest
    return output / total


def owners_seen() -> list[list[int]]:
    """The ranks whose keys are in this rank's state, after each hop of the ring.

    Each rank's value is a unit vector of its own.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    scores, values = torch.zeros(1, 1), torch.eye(size)[rank : rank + 1]
    with recorded() as found:
        ring_online_softmax(scores, values)
    states = [before for before, _, _ in found if before is not None]
    states.append(found[-1][2] if found else (values, values))
    return [output[0].nonzero().flatten().tolist() for output, _ in states]


def ring_counted() -> dict[str, Any]:
    """Messages and bytes that this rank sends, and how far it is from one process."""
    rank, size = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(0)
    keys = torch.arange(1, size + 1)  # rank r has r + 1 of them
    scores = torch.randn(ROWS, int(keys.sum()), generator=generator)
    values = torch.randn(int(keys.sum()), FEATURES, generator=generator)
    counts = keys.tolist()
    mine = scores.split(counts, -1)[rank], values.split(counts)[rank]
    with CommLedger() as ledger:
        output, lse = ring_online_softmax(*mine)
    sent = [e.nbytes for e in ledger.events if e.op.strip("_") in ("send", "isend")]
    right = scores.double().softmax(-1) @ values.double()
    return {
        "messages": len(sent),
        "bytes": sum(n or 0 for n in sent),
        "error": (output - right).abs().max().item(),
        "lse error": (lse - scores.double().logsumexp(-1)).abs().max().item(),
    }
