"""1F1B: as soon as a micro-batch can go back, it does.

    rank 0  F0 F1 F2 .  .  B0 F3 .  B1 ...       warm-up: p - 1 - rank forwards,
    rank 1     F0 F1 .  B0 F2 B1 F3 ...          then one forward, one backward,
    rank 2        F0 B0 F1 B1 F2 B2 ...          then the backwards that are left

As idle as GPipe, (p - 1)(F + B), but rank r holds the activations of at most p - r
micro-batches, however many there are. The optimizer steps once, after the last
backward (the flush); the older PipeDream has no flush and keeps versions of weights.

Source: Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters
Using Megatron-LM, SC 2021.
"""

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import check_sizes


def one_f_one_b(ranks: int, micro_batches: int) -> Schedule:
    """Warm-up, then one forward and one backward in turn; one stage a rank."""
    check_sizes("one_f_one_b", ranks, micro_batches)
    actions = tuple(_of_rank(rank, ranks, micro_batches) for rank in range(ranks))
    return Schedule("one_f_one_b", ranks, micro_batches, 1, "loop", actions)


def _of_rank(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, micro_batches)
    actions = [Action("F", rank, i) for i in range(ahead)]
    for i in range(ahead, micro_batches):
        actions += [Action("F", rank, i), Action("BW", rank, i - ahead)]
    for i in range(micro_batches - ahead, micro_batches):
        actions.append(Action("BW", rank, i))
    return actions
