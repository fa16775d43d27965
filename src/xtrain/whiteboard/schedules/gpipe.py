"""GPipe: all forwards, then all backwards.

    rank 0  F0 F1 F2 .  .  B0 B1 B2
    rank 1     F0 F1 F2 B0 B1 B2

Computes:   for each rank the order of its forwards (F) and backwards (BW).
Sends:      a stage's output to the next rank, the gradient of its input to the
            previous rank.
Leaves out: recomputation, which GPipe needs: all m micro-batches wait at once.
"""


def gpipe(ranks: int, micro_batches: int) -> list[list[str]]:
    """One stage a rank; idle (p - 1)(F + BW) of p ranks, so (p - 1)/m of the work."""
    return [
        [f"{rank}F{i}" for i in range(micro_batches)]
        + [f"{rank}BW{i}" for i in range(micro_batches)]
        for rank in range(ranks)
    ]
