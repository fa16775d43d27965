"""Interleaved 1F1B: several parts of the model on each rank, a smaller bubble.

    stage  0  1  2  3  4  5  6  7        2 chunks a rank: the micro-batch goes around
    rank   0  1  2  3  0  1  2  3        the ranks twice

Computes:   for each rank the order of its forwards (F) and backwards (BW).
Sends:      (pv - 1)/(p - 1) times as many messages as 1F1B: every virtual stage ends
            on another rank.
Leaves out: rounds of a size of your choice, which trade memory for time to send.
"""


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> list[list[str]]:
    """Idle (p - 1)(F + BW)/v, the times being those of a whole rank, if m >= p."""
    return [_of_rank(rank, ranks, micro_batches, chunks) for rank in range(ranks)]


def _of_rank(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[str]:
    rounds = max(micro_batches // ranks, 1)  # of p micro-batches, or a few more
    size, larger = divmod(micro_batches, rounds)
    forwards, backwards, first = [], [], 0
    for turn in range(rounds):
        last = first + size + (turn < larger)  # the larger rounds come first
        for chunk in range(chunks):
            for i in range(first, last):
                forwards.append(f"{chunk * ranks + rank}F{i}")
                back = chunks - 1 - chunk  # the last chunk first
                backwards.append(f"{back * ranks + rank}BW{i}")
        first = last
    ahead = (ranks - 1 - rank) * min(2, chunks)  # one chunk a rank is 1F1B
    ahead += (chunks - 1) * (size + (larger > 0))
    order = forwards[:ahead]  # warm-up
    for n, backward in enumerate(backwards):
        order += [*forwards[ahead + n : ahead + n + 1], backward]
    return order
