"""Interleaved 1F1B: several parts of the model on each rank, a smaller bubble.

    stage  0  1  2  3  4  5  6  7        2 chunks a rank: the micro-batch goes around
    rank   0  1  2  3  0  1  2  3        the ranks twice

Computes:   for each rank the order of its forwards (F) and backwards (BW).
Sends:      (pv - 1)/(p - 1) times as many messages as 1F1B: every virtual stage ends
            on another rank.
Leaves out: a number of micro-batches that the ranks do not divide.
"""


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> list[list[str]]:
    """Idle (p - 1)(F + BW)/v, the times being those of a whole rank."""
    return [_of_rank(rank, ranks, micro_batches, chunks) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[str]:
    def nth(kind: str, n: int) -> str:
        turn, within = divmod(n, ranks * chunks)
        chunk, place = divmod(within, ranks)  # p micro-batches through each chunk
        if kind == "BW":
            chunk = chunks - 1 - chunk  # the last chunk first
        return f"{chunk * ranks + rank}{kind}{turn * ranks + place}"

    total = micro_batches * chunks
    ahead = (ranks - 1 - rank) * min(2, chunks)  # one chunk a rank is 1F1B
    ahead = min(ahead + (chunks - 1) * ranks, total)
    order = [nth("F", n) for n in range(ahead)]  # warm-up
    for n in range(total):
        if ahead + n < total:
            order.append(nth("F", ahead + n))
        order.append(nth("BW", n))
    return order
