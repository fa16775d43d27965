"""Interleaved 1F1B: several parts of the model on each rank, a smaller bubble.

    stage  0  1  2  3  4  5  6  7        2 chunks a rank: the micro-batch goes around
    rank   0  1  2  3  0  1  2  3        the ranks twice

Computes:   for each rank the order of its forwards (F) and backwards (BW).
Sends:      v times what 1F1B sends: every virtual stage ends on another rank.
Leaves out: a number of micro-batches that is no multiple of the ranks.
"""


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> list[list[str]]:
    """Idle (p - 1)(F + BW)/v, the times being those of a whole rank."""
    orders = []
    for rank in range(ranks):

        def nth(kind: str, n: int, rank: int = rank) -> str:
            turn, within = divmod(n, ranks * chunks)
            chunk, place = divmod(within, ranks)  # p micro-batches through each chunk
            if kind == "BW":
                chunk = chunks - 1 - chunk
            return f"{chunk * ranks + rank}{kind}{turn * ranks + place}"

        total = micro_batches * chunks
        twice = 2 if chunks > 1 else 1  # one chunk a rank is 1F1B
        ahead = min(twice * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
        order = [nth("F", n) for n in range(ahead)]
        for n in range(total):
            if ahead + n < total:
                order.append(nth("F", ahead + n))
            order.append(nth("BW", n))
        orders.append(order)
    return orders
