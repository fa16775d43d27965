"""Interleaved 1F1B: each rank holds several parts of the model, so the pipeline fills
faster.

With v chunks a rank, rank r holds the virtual stages r, r + p, r + 2p ... A micro-batch
goes v times around the ranks. Forwards go in rounds: some micro-batches through chunk
0, the same through chunk 1, ..., then the next round; backwards likewise, from the last
chunk. Warm-up of rank r is 2(p - 1 - r) + (v - 1)q forwards, q being the first round.

    m = 11, p = 4:  two rounds, of 6 and 5      m // p rounds as even as can be, the
    m =  8, p = 4:  two rounds, of 4 and 4      larger first; m < p is one round

Idle: (p - 1)(F + B) / v, where F and B are of a whole rank, if m >= p; with fewer, the
first micro-batches come back to rank 0 after the last has left it, so it waits for
(p - m)(v - 1)(F + B) / v more. (pv - 1)/(p - 1) times as many messages as 1F1B.

Sources: Narayanan et al., SC 2021, section 2.2 (rounds of p); rounds of another size as
in torch's ScheduleInterleaved1F1B and in the Llama 3 report, 2024, section 3.3.2.
"""

from collections.abc import Sequence

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import check_sizes


def interleaved(ranks: int, micro_batches: int, chunks: int = 2) -> Schedule:
    """1F1B over `chunks` virtual stages a rank."""
    check_sizes("interleaved", ranks, micro_batches, chunks)
    count = max(micro_batches // ranks, 1)
    size, larger = divmod(micro_batches, count)
    rounds = [size + 1] * larger + [size] * (count - larger)
    actions = tuple(_of_rank(rank, ranks, rounds, chunks) for rank in range(ranks))
    return Schedule("interleaved", ranks, micro_batches, chunks, "loop", actions)


def _of_rank(rank: int, ranks: int, rounds: Sequence[int], chunks: int) -> list[Action]:
    """The order of one rank; no round is larger than the first, so no B is early."""
    forwards, backwards, first = [], [], 0
    for size in rounds:
        for chunk in range(chunks):
            for i in range(first, first + size):
                forwards.append(Action("F", chunk * ranks + rank, i))
                from_the_end = (chunks - 1 - chunk) * ranks + rank
                backwards.append(Action("BW", from_the_end, i))
        first += size
    twice = 2 if chunks > 1 else 1  # one chunk a rank is 1F1B: as much memory, too
    ahead = min(twice * (ranks - 1 - rank) + (chunks - 1) * rounds[0], len(forwards))
    actions = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        actions += [forward, backward]
    return actions + backwards[len(forwards) - ahead :]
