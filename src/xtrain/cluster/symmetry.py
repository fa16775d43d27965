"""Ranks that do the same: one of each class runs, and stands for the others.

    data x tensor, 64 ranks      all do the same with other tokens     1 runs
    pipeline of 16 stages        one of each stage                     16 run

A rank that does not run comes to every collective when the one does that stands for it
in the group, with the same tensors; its clock and memory are that one's. A rank that
sends to one that it stands for, as in a ring, receives its own messages in their order,
over the links from the one it receives from; other messages to ranks that do not run
have no other end, so they are refused. What ranks send over links that their classes
share is counted once for each rank that runs: times are those of all ranks as long as
groups of the same kind use links of their own.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from xtrain.cluster.moves import Part

Alike = Sequence[int] | Callable[[int], int]


def stand_ins_of(size: int, alike: Alike | None) -> list[int]:
    """For each rank the one that runs in its place; ValueError if that does not run."""
    if alike is None:
        return list(range(size))
    found = [alike(rank) for rank in range(size)] if callable(alike) else list(alike)
    if len(found) != size:
        raise ValueError(f"alike names {len(found)} ranks, the cluster has {size}")
    for rank, other in enumerate(found):
        if type(other) is not int or not 0 <= other < size or found[other] != other:
            raise ValueError(
                f"alike: rank {rank} is run by {other!r}, which is not a rank that "
                "runs in its own place"
            )
    return found


def in_group(ranks: Sequence[int], stand_ins: Sequence[int]) -> list[int]:
    """The same by places in a group: the first that runs where its own is elsewhere."""
    places = {rank: place for place, rank in enumerate(ranks)}
    first = next(place for rank, place in places.items() if stand_ins[rank] == rank)
    return [places.get(stand_ins[rank], first) for rank in ranks]


def parts_of_all(works: Sequence[Any], stand_ins: Sequence[int]) -> list[Part]:
    """The parts of a collective; a rank that does not run takes into new tensors."""
    parts = []
    for work, stand_in in zip(works, stand_ins, strict=True):
        part = works[stand_in].part
        if work is None:
            taken = [torch.empty_like(tensor) for tensor in part.outputs]
            part = Part(part.kind, taken, part.inputs, part.op, part.root)
        parts.append(part)
    return parts
