"""Placement of experts: the hottest get copies, then longest first, to the emptiest.

    loads 8 2 2 1      copies 2 2 1 1: each carries 4 1 2 1
    2 ranks, 3 slots   0 onto both, 2 onto rank 0, 1 onto both, 3 onto rank 1: 7 and 6

Computes:   which experts each rank holds, so that its largest load is small.
Sends:      nothing: all ranks plan from one count of the tokens, and find one table.
Leaves out: swaps and free slots, which can lower the largest load; nodes; checks.
"""

from collections.abc import Sequence


def plan_placement(
    loads: Sequence[float], ranks: int, slots_per_rank: int
) -> list[list[int]]:
    """Copies share an expert's tokens; no rank has two, so slots <= experts."""
    experts, copies = range(len(loads)), [1] * len(loads)

    def each(expert: int) -> float:
        return loads[expert] / copies[expert]

    for _ in range(ranks * slots_per_rank - len(loads)):
        hottest = max((e for e in experts if copies[e] < ranks), key=each)
        copies[hottest] += 1

    table: list[list[int]] = [[] for _ in range(ranks)]
    sums = [0.0] * ranks
    for expert in sorted(experts, key=each, reverse=True):
        free = [r for r in range(ranks) if len(table[r]) < slots_per_rank]
        free.sort(key=lambda r: sums[r])
        for rank in free[: copies[expert]]:  # very seldom too few: a copy is dropped
            table[rank].append(expert)
            sums[rank] += each(expert)
    return [sorted(held) for held in table]
