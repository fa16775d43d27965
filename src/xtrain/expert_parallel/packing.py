"""How many replicas each expert gets, and how replicas are packed onto ranks.

    loads 8 2 2 1, 6 slots on 2 ranks

    replica_counts   8 becomes 4 4, the first 2 becomes 1 1: [2, 2, 1, 1]
    pack             [0 1 2] carries 4 + 1 + 2, [0 1 3] carries 4 + 1 + 1

See `expert_placement`. Both are deterministic: of equals, the first.
"""

import heapq
from collections.abc import Iterator, Sequence


def replica_counts(loads: Sequence[float], slots: int, ranks: int) -> list[int]:
    """Replicas of each expert, `slots` together and at most one a rank.

    Each next replica goes to the expert whose replicas are the most loaded. No other
    counts of the same sum have a smaller largest load per replica.
    """
    counts = [1] * len(loads)
    heap = [(-load, expert) for expert, load in enumerate(loads) if ranks > 1]
    heapq.heapify(heap)
    for _ in range(slots - len(loads)):
        _, expert = heapq.heappop(heap)
        counts[expert] += 1
        if counts[expert] < ranks:
            heapq.heappush(heap, (-loads[expert] / counts[expert], expert))
    return counts


def pack(
    loads: Sequence[float], counts: Sequence[int], ranks: int, slots: int
) -> list[list[int]]:
    """The experts on each rank: none twice on one, at most `slots` on one.

    The largest sum of loads / counts is above the smallest by one replica's load at
    most.
    """
    table: list[list[int]] = [[] for _ in range(ranks)]
    each = [load / count for load, count in zip(loads, counts, strict=True)]
    sums = [0.0] * ranks
    for expert in sorted(range(len(loads)), key=lambda e: (-each[e], e)):
        # The most free slots first: counts then differ by 1 at most.
        places = sorted(range(ranks), key=lambda r: (len(table[r]), sums[r], r))
        for rank in places[: counts[expert]]:
            table[rank].append(expert)
            sums[rank] += each[expert]
    while _lowered(table, each, slots):
        pass
    return table


def _lowered(table: list[list[int]], each: list[float], slots: int) -> bool:
    """Do the swap or move that lowers the fullest rank most; False if none does."""
    sums = [sum(each[e] for e in held) for held in table]
    top = max(range(len(table)), key=lambda r: (sums[r], -r))
    best: tuple[float, int, int, int | None] | None = None
    for rank, held in enumerate(table):
        gap = sums[top] - sums[rank]
        for down, up in _exchanges(table[top], held, slots):
            step = each[down] - (0.0 if up is None else each[up])
            # What is left of the gap, either way round; rounding is not progress.
            left = abs(gap - 2 * step)
            if gap - left <= 1e-9 * sums[top]:
                continue
            if best is None or sums[rank] + (gap + left) / 2 < best[0]:
                best = (sums[rank] + (gap + left) / 2, rank, down, up)
    if best is None:
        return False
    _, rank, down, up = best
    table[top].remove(down)
    table[rank].append(down)
    if up is not None:
        table[rank].remove(up)
        table[top].append(up)
    return True


def _exchanges(
    full: list[int], other: list[int], slots: int
) -> Iterator[tuple[int, int | None]]:
    """(goes to the other, comes back or None), so that no rank has an expert twice."""
    for down in full:
        if down in other:
            continue
        if len(other) < slots:
            yield down, None
        for up in other:
            if up not in full:
                yield down, up
