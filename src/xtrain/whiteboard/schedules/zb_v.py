"""ZB-V: two stages a rank, down the ranks and back up; no bubble in 1F1B's memory.

    stage  0  1  2  3  4  5  6  7        the last rank turns around at once, so its
    rank   0  1  2  3  3  2  1  0        first backward begins early

Computes:   for each rank the order of F, B (gradient of the input) and W.
Sends:      an output and a gradient at each of 2p - 2 borders; none where it turns.
Leaves out: fewer than 2p - 1 micro-batches, and checks.
"""

from collections import Counter


def zb_v(ranks: int, micro_batches: int) -> list[list[str]]:
    """No rank idles if F = B = W; activations of p micro-batches wait on each."""
    return [_of_rank(rank, ranks, micro_batches) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, micro_batches: int) -> list[str]:
    down, up = rank, 2 * ranks - 1 - rank
    done, order = Counter[tuple[str, int]](), list[str]()

    def do(*steps: tuple[str, int]) -> None:
        for kind, stage in steps:
            order.append(f"{stage}{kind}{done[kind, stage]}")
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):  # the way down fills
        do(("F", down))
    for _ in range(rank):  # the first ones come back up
        do(("F", up), ("F", down))
    for _ in range(ranks - rank):  # gradients of the last stages
        do(("F", up), ("B", up), ("W", up))
    while done["F", up] < micro_batches:  # steady state
        if done["F", down] < micro_batches:
            do(("F", down))
        do(("B", down), ("W", down), ("F", up), ("B", up), ("W", up))
    for _ in range(rank):  # no forwards are left: B, for which other ranks wait
        do(("B", down), ("B", up))
    for _ in range(ranks - rank):
        do(("B", down), ("W", down))
    for stage in (up, down):  # the weights that were put off
        while done["W", stage] < micro_batches:
            do(("W", stage))
    return order
