"""1F1B: after a warm-up, one forward and one backward in turn.

    rank 0  F0 F1 .  .  B0 F2 B1 F3 ...     warm-up: p - 1 - rank forwards
    rank 1     F0 B0 F1 B1 F2 B2 ...

Computes:   for each rank the order of its forwards (F) and backwards (BW).
Sends:      a stage's output to the next rank, the gradient of its input to the
            previous rank.
Leaves out: several stages a rank, and putting off the gradients of weights.
"""


def one_f_one_b(ranks: int, micro_batches: int) -> list[list[str]]:
    """As idle as GPipe, but rank r keeps at most p - r micro-batches, not all m."""
    orders = []
    for rank in range(ranks):
        ahead = min(ranks - 1 - rank, micro_batches)
        order = [f"{rank}F{i}" for i in range(ahead)]
        for i in range(micro_batches):
            if ahead + i < micro_batches:
                order.append(f"{rank}F{ahead + i}")
            order.append(f"{rank}BW{i}")
        orders.append(order)
    return orders
