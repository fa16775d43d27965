"""Interleaved 1F1B: each rank holds several parts of the model, so the pipeline fills
faster.

With v chunks a rank, rank r holds the virtual stages r, r + p, r + 2p ... A micro-batch
goes v times around the ranks. Forwards go in rounds: p micro-batches through chunk 0,
the same p through chunk 1, ..., then the next p; backwards likewise, from the last
chunk. Warm-up of rank r is 2(p - 1 - r) + (v - 1)p forwards.

Idle: (p - 1)(F + B) / v, where F and B are of a whole rank; (pv - 1)/(p - 1) times as
many messages as 1F1B. m is a multiple of p.

Source: Narayanan et al., SC 2021, section 2.2.
"""

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import check_multiple, check_sizes


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` virtual stages a rank."""
    check_sizes("interleaved", ranks, micro_batches, chunks)
    why = f"micro-batches go around {ranks} ranks in rounds of {ranks}"
    check_multiple("interleaved", micro_batches, ranks, why)
    actions = tuple(
        _of_rank(rank, ranks, micro_batches, chunks) for rank in range(ranks)
    )
    return Schedule("interleaved", ranks, micro_batches, chunks, "loop", actions)


def _of_rank(rank: int, ranks: int, micro_batches: int, chunks: int) -> list[Action]:
    def nth(kind: str, n: int) -> Action:
        """The n-th forward or backward of this rank."""
        turn, within = divmod(n, ranks * chunks)
        chunk, place = divmod(within, ranks)
        if kind == "BW":
            chunk = chunks - 1 - chunk
        return Action(kind, chunk * ranks + rank, turn * ranks + place)

    total = micro_batches * chunks
    twice = 2 if chunks > 1 else 1  # one chunk a rank is 1F1B: as much memory, too
    ahead = min(twice * (ranks - 1 - rank) + (chunks - 1) * ranks, total)
    actions = [nth("F", n) for n in range(ahead)]
    for n in range(ahead, total):
        actions += [nth("F", n), nth("BW", n - ahead)]
    return actions + [nth("BW", n) for n in range(total - ahead, total)]
