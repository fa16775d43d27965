"""Chimera: two 1F1B pipelines through the same ranks in opposite directions.

    slot       0  1  2  3  4  5  6  7  8  9
    rank 0     F0    F1 F2 B2 F3 B3 B0    B1     4 ranks; 0 and 1 go down, 2 and 3 up

If every action took one slot, forward s of a direction's micro-batch j would be in slot
s + 2j and its backward in slot 2p - 1 - s + 2j: the two directions take even and odd
slots of a rank and never collide. The order of slots is the schedule. In a batch of
more than p micro-batches, the next p follow 2p slots later.

With p micro-batches and BW = 2F a rank is idle for (p - 2) / (3p / 2 + p - 2) of the
time. Every weight is held twice, as in DualPipe; nothing overlaps, and W is not split
off.

Source: Li and Hoefler, Chimera: Efficiently Training Large-Scale Neural Networks with
Bidirectional Pipelines, SC 2021.
"""

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import check_even_ranks, check_multiple, check_sizes


def chimera(ranks: int, micro_batches: int) -> Schedule:
    """Half of the micro-batches down the ranks, half up, slot by slot."""
    check_sizes("chimera", ranks, micro_batches)
    check_even_ranks("chimera", ranks)
    check_multiple("chimera", micro_batches, 2, "half of them enter at each end")
    actions = tuple(_of_rank(rank, ranks, micro_batches) for rank in range(ranks))
    return Schedule("chimera", ranks, micro_batches, 1, "mirror", actions)


def _of_rank(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    half, at_once = micro_batches // 2, ranks // 2
    slots = {}
    for stage, first in ((rank, 0), (ranks - 1 - rank, half)):
        for i in range(half):
            turn, j = divmod(i, at_once)
            start = turn * 2 * ranks + 2 * j
            slots[start + stage] = Action("F", stage, first + i)
            slots[start + 2 * ranks - 1 - stage] = Action("BW", stage, first + i)
    return [slots[slot] for slot in sorted(slots)]
