"""Which messages torch's collectives are made of: hops one after another, and edges.

all_reduce      ring: 2(N-1) hops, 2(N-1)/N of the tensor on each edge of the ring;
                or two trees: 2 log2(N) hops, half of it up and down each tree;
                what is faster, as NCCL chooses
all_gather, reduce_scatter    ring: N-1 hops, (N-1)/N of the whole on each edge
broadcast, reduce             a chain, pipelined: N-1 hops, all of it on each edge
all_to_all, gather, scatter   one hop, to each rank what is for it
barrier                       log2(N) hops there and back, no bytes

Between nodes a ring is as many rings as a node has ranks, each with a part of the bytes
and with an adapter of its own, as NCCL's channels are.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from xtrain.cluster.moves import Part

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one collective puts on the network.

    Attributes:
        hops: messages that follow one another: the latency is paid for each.
        edges: bytes from rank to rank, in global ranks.
    """

    hops: int
    edges: dict[Edge, float]


def ring(ranks: Sequence[int], hops: int, nbytes: float, node: int = 1) -> Pattern:
    """`nbytes` on each edge of a ring, or of rings: one for each rank of a node."""
    orders, edges = rings(ranks, node), dict[Edge, float]()
    for order in orders:
        for edge in zip(order, [*order[1:], order[0]], strict=True):
            edges[edge] = edges.get(edge, 0.0) + nbytes / len(orders)
    return Pattern(hops, edges)


def rings(ranks: Sequence[int], node: int) -> list[list[int]]:
    """Ring k enters each node at its rank k; one ring unless all nodes are alike."""
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // node, []).append(rank)
    counts = {len(members) for members in nodes.values()}
    if len(nodes) == 1 or len(counts) > 1:
        return [list(ranks)]
    return [
        [rank for members in nodes.values() for rank in members[k:] + members[:k]]
        for k in range(counts.pop())
    ]


def chain(ranks: Sequence[int], nbytes: float) -> Pattern:
    return Pattern(len(ranks) - 1, dict.fromkeys(pairwise(ranks), nbytes))


def trees(ranks: Sequence[int], nbytes: float) -> Pattern:
    """Two binary trees, each for half of the bytes: inner ranks of one are leaves of
    the other (Sanders, Speck and Traeff, 2009).
    """
    size, edges = len(ranks), dict[Edge, float]()
    for order in (list(ranks), [*ranks[1:], ranks[0]]):
        for place in range(1, size):
            parent = _parent(place, size)
            for edge in ((order[place], order[parent]), (order[parent], order[place])):
                edges[edge] = edges.get(edge, 0.0) + nbytes / 2
    return Pattern(2 * math.ceil(math.log2(size)), edges)


def _parent(place: int, size: int) -> int:
    """Of a tree in order over places 1 to size - 1, its root a child of place 0."""
    bit = place & -place
    up = (place & ~bit) | (bit << 1)
    return up if up < size else place & ~bit


def pairs(parts: Sequence[Part], ranks: Sequence[int]) -> Pattern:
    edges = {
        (ranks[source], ranks[target]): float(tensor.nbytes)
        for source, part in enumerate(parts)
        for target, tensor in enumerate(part.inputs)
        if source != target and tensor.nbytes
    }
    return Pattern(1, edges)


def patterns_of(
    parts: Sequence[Part], ranks: Sequence[int], node: int = 1
) -> list[Pattern]:
    """The ways in which a collective may go; the fastest is taken.

    Args:
        node: ranks of a node, see `Topology`.
    """
    part, size = parts[0], len(ranks)
    if size == 1:
        return [Pattern(0, {})]
    if part.kind == "barrier":
        return [Pattern(2 * math.ceil(math.log2(size)), {})]
    if part.kind == "all_to_all":
        return [pairs(parts, ranks)]
    share = part.nbytes * (size - 1) / size
    if part.kind == "all_reduce":
        two = trees(ranks, part.nbytes)
        return [ring(ranks, 2 * (size - 1), 2 * share, node), two]
    if part.kind == "broadcast" or part.kind == "reduce":
        root = part.root
        from_root = [*ranks[root:], *ranks[:root]]
        return [
            chain(
                from_root if part.kind == "broadcast" else from_root[::-1], part.nbytes
            )
        ]
    return [ring(ranks, size - 1, share, node)]
