"""Chimera: two 1F1B pipelines through the same ranks in opposite directions.

    slot       0  1  2  3  4  5  6  7  8  9
    rank 0     F0    F1 F2 B2 F3 B3 B0    B1     4 ranks; 0 and 1 go down, 2 and 3 up

Computes:   for each rank the order of its forwards (F) and backwards (BW).
Sends:      activations and gradients to both neighbours, each stage being there twice.
Leaves out: checks: ranks and micro-batches even; the sum of the two copies' gradients.
"""


def chimera(ranks: int, micro_batches: int) -> list[list[str]]:
    """Idle 2(p - 2)F if BW = 2F and m = p, where 1F1B has 3(p - 1)F; weights twice."""
    return [_of_rank(rank, ranks, micro_batches // 2) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, half: int) -> list[str]:
    slots = {}  # one direction has the even slots of a rank, the other the odd ones
    for stage, first in ((rank, 0), (ranks - 1 - rank, half)):
        for i in range(half):
            turn, place = divmod(i, ranks // 2)  # p/2 of a direction are under way
            start = turn * 2 * ranks + 2 * place
            slots[start + stage] = f"{stage}F{first + i}"  # down the stages
            slots[start + 2 * ranks - 1 - stage] = f"{stage}BW{first + i}"  # and back
    return [slots[slot] for slot in sorted(slots)]
