"""Traffic of the ring algorithms: every rank sends to its right neighbour only.

    ring all-reduce, 4 ranks, M elements

      reduce-scatter, 3 steps      all-gather, 3 steps
      rank r sends 3 chunks        rank r sends 3 chunks
      3/4 M                        3/4 M                     = 2 (4-1)/4 M = 1.5 M

Source: Patarasuk and Yuan, JPDC 69(2), 2009.
"""

from collections.abc import Sequence

from xtrain.plan.traffic import Traffic, chunk_sizes


def ring_reduce_scatter(numel: int, ranks: int) -> Traffic:
    """`numel` elements in, rank r keeps the sum of chunk r: (p-1)/p of them sent."""
    return _ring(chunk_sizes(numel, ranks), first=-1)


def ring_all_gather(numel: int, ranks: int) -> Traffic:
    """Every rank gives its chunk and ends with all `numel`: (p-1)/p of them sent."""
    return _ring(chunk_sizes(numel, ranks), first=0)


def ring_all_reduce(numel: int, ranks: int) -> Traffic:
    """Reduce-scatter, then all-gather: 2(p-1)/p of `numel`, whatever p is."""
    return ring_reduce_scatter(numel, ranks).then(ring_all_gather(numel, ranks))


def _ring(chunks: Sequence[int], first: int) -> Traffic:
    """p-1 steps around the ring; rank r starts with chunk r + first and walks down.

    It sends p-1 chunks: all but the next one up. What arrives is what its left
    neighbour, r-1, sends.
    """
    ranks, numel = len(chunks), sum(chunks)
    sent = [numel - chunks[(rank + first + 1) % ranks] for rank in range(ranks)]
    received = [sent[rank - 1] for rank in range(ranks)]
    return Traffic(tuple(sent), tuple(received), ranks - 1)
