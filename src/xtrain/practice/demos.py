"""Small inputs with which a page draws a drill: numbers that tell whose they are.

sums     rank r brings 16^r, so the digits of a sum count its ranks
moves    rank r's number j is 100 r + j, which is drawn as "r.j"
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BASE = 16


@dataclass
class Demo:
    """One rank's call of a form, and the tensors that are drawn."""

    args: tuple[Any, ...]
    shown: dict[str, Any]
    named: dict[str, Any] = field(default_factory=dict)


def own(rank: int, count: int) -> Tensor:
    """Numbers that this rank brings."""
    return torch.full((count,), float(BASE**rank))


def all_reduce(rank: int, size: int) -> Demo:
    tensor = own(rank, size)
    return Demo((tensor,), {"tensor": tensor})


def exchange(rank: int, size: int) -> Demo:
    outgoing, incoming = own(rank, 2), torch.empty(2)
    args = outgoing, (rank + 1) % size, incoming, (rank - 1) % size
    return Demo(args, {"send": outgoing, "recv": incoming})


def rooted(rank: int, size: int) -> Demo:
    tensor = own(rank, 2)
    return Demo((tensor, 0), {"tensor": tensor})


def gather(rank: int, size: int) -> Demo:
    tensor = own(rank, 1)
    pieces = [torch.empty(1) for _ in range(size)] if rank == 0 else None
    return Demo((tensor, pieces, 0), {"tensor": tensor, "gather_list": pieces or []})


def scatter(rank: int, size: int) -> Demo:
    tensor = torch.empty(1)
    pieces = [own(r, 1) for r in range(size)] if rank == 0 else None
    return Demo((tensor, pieces, 0), {"tensor": tensor, "scatter_list": pieces or []})


def reduce_scatter(rank: int, size: int) -> Demo:
    output, given = torch.empty(1), own(rank, size)
    return Demo((output, given), {"input": given, "output": output})


def all_gather(rank: int, size: int) -> Demo:
    output, given = torch.empty(size), own(rank, 1)
    return Demo((output, given), {"input": given, "output": output})


def all_to_all(rank: int, size: int) -> Demo:
    given = 100.0 * rank + torch.arange(size).double()
    output = torch.empty(size)
    return Demo((output, given), {"input": given, "output": output})


def hierarchical(rank: int, size: int) -> Demo:
    ranks = list(range(size))
    nodes = [dist.new_group(ranks[i : i + 2]) for i in range(0, size, 2)]
    peers = [dist.new_group(ranks[i::2]) for i in range(2)]
    tensor = own(rank, size)
    groups = {"intra_group": nodes[rank // 2], "inter_group": peers[rank % 2]}
    return Demo((tensor,), {"tensor": tensor}, groups)


def positions(rank: int, size: int) -> Demo:
    tokens = torch.arange(4 * size)
    return Demo((tokens, 0, "zigzag"), {"x": tokens})


DEMOS: dict[str, Callable[[int, int], Demo]] = {
    "exchange": exchange,
    "broadcast": rooted,
    "reduce": rooted,
    "gather": gather,
    "scatter": scatter,
    "ring_reduce_scatter": reduce_scatter,
    "ring_all_gather": all_gather,
    "ring_all_reduce": all_reduce,
    "tree_all_reduce": all_reduce,
    "halving_doubling_all_reduce": all_reduce,
    "hierarchical_all_reduce": hierarchical,
    "one_shot_all_reduce": all_reduce,
    "parameter_server_all_reduce": all_reduce,
    "all_to_all_single": all_to_all,
    "shard_sequence": positions,
}
MOVES = ("all_to_all_single",)
PLAIN = ("shard_sequence",)
"""Drills whose numbers are drawn as they are."""


def legend(name: str) -> str:
    """What a cell shows."""
    if name in PLAIN:
        return ""
    if name in MOVES:
        return ": 2.1 is rank 2's number 1"
    return ": 0+2 is the sum of ranks 0 and 2, 1…3 that of ranks 1 to 3"


def labels(name: str, size: int) -> Callable[[float], str]:
    """How a number of a drill is drawn."""
    if name in PLAIN:
        return lambda value: "?" if value != value else f"{value:g}"
    return of_move if name in MOVES else lambda value: of_sum(value, size)


def of_move(value: float) -> str:
    return "?" if value != value else f"{int(value) // 100}.{int(value) % 100}"


def of_sum(value: float, size: int) -> str:
    """ "0+2", "1…3", "2×1" (rank 1 twice), "all"; another number as it is."""
    if value != value:
        return "?"
    if value < 0 or value != int(value) or value >= BASE**size:
        return f"{value:.3g}"
    counts = [int(value) // BASE**r % BASE for r in range(size)]
    if not any(counts):
        return "0"
    if counts == [1] * size and size > 1:
        return "all"
    if max(counts) > 1:
        parts = [f"{c}×{r}" if c > 1 else str(r) for r, c in enumerate(counts) if c]
        return "+".join(parts)
    ranks = [r for r, c in enumerate(counts) if c]
    return run_of(ranks, size) or "+".join(map(str, ranks))


def run_of(ranks: Sequence[int], size: int) -> str:
    """ "6…1" for ranks 6, 7, 0, 1 of a ring of 8; empty for fewer than 3."""
    for first in ranks:
        if len(ranks) > 2 and {(first + i) % size for i in range(len(ranks))} == {
            *ranks
        }:
            return f"{first}…{(first + len(ranks) - 1) % size}"
    return ""
