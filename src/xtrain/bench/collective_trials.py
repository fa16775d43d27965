"""Trials of collectives: what every contestant is given, and what it must leave.

All get the same tensor of float32 whole numbers, so that sums are exact and any order
of adding gives the same bits:

    element i on rank r = (r + 1) (i mod 101)

A case's size is the whole tensor in bytes: an all-reduce's tensor, a reduce-scatter's
input, an all-gather's output. After the check the tensors are zeroed, so that thousands
of in-place sums stay in range.
"""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.bench.race import Case, RaceError, Trial
from xtrain.comm.collective_kinds import OF_PARTS, prepare

KiB, MiB = 2**10, 2**20
ITEM = 4  # bytes of a float32


def pattern(case: Case, factor: int) -> Tensor:
    """`factor` times 0, 1, ..., 100, 0, 1, ...: whole numbers, exact in float32."""
    index = torch.arange(case.size // ITEM, dtype=torch.int32)
    return index.remainder_(101).mul_(factor).to(case.device, torch.float32)


def total(case: Case) -> Tensor:
    """The sum of all ranks' patterns."""
    return pattern(case, case.ranks * (case.ranks + 1) // 2)


def trial(kind: str, function: Callable[..., object], case: Case) -> Trial:
    """A collective of a kind that `xtrain.comm.collective_kinds` knows."""
    if kind in OF_PARTS:
        check_pieces(case)
    call = prepare(kind, function, pattern(case, dist.get_rank() + 1))
    return Trial(call.run, [call.result], call.given.zero_)


def check_pieces(case: Case) -> None:
    """RaceError unless every rank gets the same whole number of elements."""
    if case.size % (ITEM * case.ranks):
        raise RaceError(
            f"{case.size} bytes are not a whole number of float32 on each of "
            f"{case.ranks} ranks"
        )


# -------------------------------------------------------------------- references


def all_reduce_reference(case: Case) -> list[Tensor]:
    """The sum, on every rank."""
    return [total(case)]


def reduce_scatter_reference(case: Case) -> list[Tensor]:
    """This rank's piece of the sum."""
    return [total(case).tensor_split(case.ranks)[dist.get_rank()]]


def all_gather_reference(case: Case) -> list[Tensor]:
    """All pieces, one after the other."""
    pieces = [
        pattern(case, rank + 1).tensor_split(case.ranks)[rank]
        for rank in range(case.ranks)
    ]
    return [torch.cat(pieces)]


def broadcast_reference(case: Case) -> list[Tensor]:
    """What rank 0 has."""
    return [pattern(case, 1)]


def all_to_all_reference(case: Case) -> list[Tensor]:
    """This rank's piece of every rank's tensor."""
    rank = dist.get_rank()
    givers = range(case.ranks)
    wholes = [pattern(case, giver + 1).tensor_split(case.ranks) for giver in givers]
    return [torch.cat([pieces[rank] for pieces in wholes])]
