"""Deal matrices out to ranks, and find what each rank sends for them.

    held       a a a b | b b b b | b c c c     here flat, on three ranks
    owners     a: 0      b: 1      c: 2

    gather     b of ranks 0 and 2 -> rank 1    pieces of the momentum
    compute    every rank its own matrices, whole
    scatter    b of rank 1 -> ranks 0 and 2    pieces of the update

A matrix goes to a rank that holds some of it: the one with the least work so far, the
most expensive matrix first. Stacked matrices that are held by the same ranks, as
experts are, stay together, and are one batch.

Of a piece that several ranks hold, one copy is read: that of the rank nearest to the
owner, which is the owner itself if it has one. All copies get the result.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import NamedTuple

from xtrain.checkpoint.boxes import Box, covering_problem, overlap


class Held(NamedTuple):
    """What one rank holds of a parameter, and who sums its gradient with this rank."""

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    summed_with: tuple[int, ...] = ()
    """Ranks whose gradients are parts of a sum; none if the sum is there already."""


class Stack(NamedTuple):
    """One matrix, or some neighbours of a stack of them, that one rank computes."""

    name: str
    box: Box

    @property
    def work(self) -> int:
        """In proportion to the operations of Newton-Schulz."""
        rows, columns = self.box.size[-2:]
        return self.box.numel * min(rows, columns)


class Route(NamedTuple):
    """A box of a parameter that goes from one rank to another, or to itself."""

    source: int
    target: int
    stack: Stack
    box: Box


class Round(NamedTuple):
    """What this rank sends and gets for some matrices that travel together."""

    reduce: list[Route]
    gather: list[Route]
    scatter: list[Route]


def deal(
    held_by_rank: Sequence[Mapping[str, Held]], rank: int, elements: float = math.inf
) -> tuple[dict[Stack, int], list[Round]]:
    """Who computes what, the same on all ranks; and this rank's rounds.

    A round has matrices of every rank, as long as it has some, and more of them until
    there are so many `elements`.
    ValueError unless the ranks hold every element, in pieces that are equal or apart.
    """
    names = dict.fromkeys(name for held in held_by_rank for name in held)
    holders = {
        name: {r: held[name] for r, held in enumerate(held_by_rank) if name in held}
        for name in names
    }
    stacks = [stack for name in names for stack in stacks_of(name, holders[name])]
    stacks.sort(key=lambda stack: (-stack.work, stack))
    work = [0] * len(held_by_rank)
    own: list[list[Stack]] = [[] for _ in held_by_rank]
    copies = {stack: copies_of(stack, holders[stack.name]) for stack in stacks}
    for stack in stacks:
        shares: dict[int, int] = {}
        for box, ranks in copies[stack].items():
            shares |= {r: shares.get(r, 0) + box.numel for r in ranks}
        owner = min(shares, key=lambda r: (work[r], -shares[r], r))
        work[owner] += stack.work
        own[owner].append(stack)
    owners = {stack: r for r, mine in enumerate(own) for stack in mine}
    rounds, size = [Round([], [], [])], 0
    for together in zip_longest(*own):
        if size >= elements:
            rounds.append(Round([], [], []))
            size = 0
        for stack in filter(None, together):
            size += stack.box.numel
            routes = routes_of(stack, owners[stack], copies[stack], holders[stack.name])
            for kept, made in zip(rounds[-1], routes, strict=True):
                kept.extend(r for r in made if rank in (r.source, r.target))
    return owners, rounds


def routes_of(
    stack: Stack,
    owner: int,
    copies: Mapping[Box, list[int]],
    holders: Mapping[int, Held],
) -> Round:
    """All that is sent for a stack, by any rank."""
    made = Round([], [], [])
    for box, ranks in copies.items():
        reader = min(ranks, key=lambda r: (abs(r - owner), r))
        parts = holders[reader].summed_with
        made.reduce.extend(Route(r, reader, stack, box) for r in parts)
        made.gather.append(Route(reader, owner, stack, box))
        made.scatter.extend(Route(owner, r, stack, box) for r in ranks)
    return made


def stacks_of(name: str, holders: Mapping[int, Held]) -> list[Stack]:
    """A parameter's matrices: neighbours in a stack together, if held by the same."""
    shape = next(iter(holders.values())).shape
    distinct = {box for held in holders.values() for box in held.boxes}
    if problem := covering_problem(shape, sorted(distinct)):
        raise ValueError(f"{name} {list(shape)}: of what the ranks hold {problem}")
    if len(shape) == 2:
        return [Stack(name, Box((0, 0), shape))]
    runs: list[tuple[set[int], int, int]] = []  # holders, first matrix, one past last
    for number in range(shape[0]):
        ranks = {
            rank
            for rank, held in holders.items()
            for box in held.boxes
            if box.offset[0] <= number < box.end[0]
        }
        if runs and runs[-1][0] == ranks:
            runs[-1] = ranks, runs[-1][1], number + 1
        else:
            runs.append((ranks, number, number + 1))
    return [
        Stack(name, Box((first, 0, 0), (last - first, *shape[1:])))
        for _, first, last in runs
    ]


def copies_of(stack: Stack, holders: Mapping[int, Held]) -> dict[Box, list[int]]:
    """The pieces of a stack, each with the ranks that hold it."""
    found: dict[Box, list[int]] = {}
    for rank, held in holders.items():
        for box in held.boxes:
            common = overlap(box, stack.box)
            if common is not None:
                found.setdefault(common, []).append(rank)
    return found
