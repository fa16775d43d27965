"""GPipe: all forwards, then all backwards.

    rank 0  F0 F1 F2 .  .  .  .  B0 B1 B2
    rank 1     F0 F1 F2 .  .  B0 B1 B2
    rank 2        F0 F1 F2 B0 B1 B2

Idle: (p - 1)(F + B) on every rank, of p ranks; activations of all m micro-batches wait
for their backward at the same time.

Source: Huang et al., GPipe: Efficient Training of Giant Neural Networks using Pipeline
Parallelism, NeurIPS 2019.
"""

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import check_sizes


def gpipe(ranks: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, one stage a rank."""
    check_sizes("gpipe", ranks, micro_batches)
    actions = tuple(
        [Action("F", rank, i) for i in range(micro_batches)]
        + [Action("BW", rank, i) for i in range(micro_batches)]
        for rank in range(ranks)
    )
    return Schedule("gpipe", ranks, micro_batches, 1, "loop", actions)
