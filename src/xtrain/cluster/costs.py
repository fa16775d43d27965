"""Which messages torch's collectives are made of: hops one after another, and edges.

all_reduce      ring: 2(N-1) hops, 2(N-1)/N of the tensor on each edge of the ring;
                or two trees: 2 log2(N) hops, half of it up and down each tree;
                what is faster, as NCCL chooses
all_gather, reduce_scatter    ring: N-1 hops, (N-1)/N of the whole on each edge
broadcast, reduce             a chain, pipelined: N-1 hops, all of it on each edge
all_to_all, gather, scatter   one hop, to each rank what is for it
barrier                       log2(N) hops there and back, no bytes

Rings, trees and chains over whole nodes have a channel for each GPU of a node, as
NCCL's: a share of the bytes each, with another GPU where it enters a node and another
where it leaves. So all adapters of a node are used. A chain is a ring, opened before
its root.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from xtrain.cluster.moves import Part

Edge = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Pattern:
    """What one collective puts on the network.

    Attributes:
        hops: messages that follow one another: the latency is paid for each.
        edges: bytes from rank to rank, in global ranks.
        around: a hop is the next edge of a ring or chain, of unlike latencies.
    """

    hops: int
    edges: dict[Edge, float]
    around: bool = False


def ring(ranks: Sequence[int], hops: int, nbytes: float) -> Pattern:
    following = [*ranks[1:], ranks[0]]
    edges = dict.fromkeys(zip(ranks, following, strict=True), nbytes)
    return Pattern(hops, edges, around=True)


def channels(ranks: Sequence[int], node: int) -> list[Sequence[int]]:
    """Orders of the same ranks, each with another one first in every node."""
    nodes = [list(inside) for _, inside in groupby(ranks, lambda rank: rank // node)]
    size = len(nodes[0])
    if len(nodes) == 1 or any(len(inside) != size for inside in nodes):
        return [ranks]
    return [
        [rank for inside in nodes for rank in (*inside[c:], *inside[:c])]
        for c in range(size)
    ]


def spread(
    make: Callable[[Sequence[int], float], Pattern],
    orders: Sequence[Sequence[int]],
    nbytes: float,
) -> Pattern:
    """A pattern over each of the orders, with an equal share of the bytes."""
    patterns = [make(order, nbytes / len(orders)) for order in orders]
    edges: dict[Edge, float] = {}
    for pattern in patterns:
        for edge, share in pattern.edges.items():
            edges[edge] = edges.get(edge, 0.0) + share
    return Pattern(patterns[0].hops, edges, patterns[0].around)


def chain(ranks: Sequence[int], nbytes: float) -> Pattern:
    edges = dict.fromkeys(pairwise(ranks), nbytes)
    return Pattern(len(ranks) - 1, edges, around=True)


def starting_with(first: int, order: Sequence[int]) -> Sequence[int]:
    """A ring, opened before one of its ranks."""
    place = order.index(first)
    return [*order[place:], *order[:place]]


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
        node: so many ranks, one after another, are a node.
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
        orders, hops = channels(ranks, node), 2 * (size - 1)
        around = spread(lambda order, n: ring(order, hops, n), orders, 2 * share)
        return [around, spread(trees, orders, part.nbytes)]
    orders = channels(ranks, node)
    if part.kind in ("broadcast", "reduce"):
        orders = [starting_with(ranks[part.root], order) for order in orders]
        if part.kind == "reduce":
            orders = [order[::-1] for order in orders]
        return [spread(chain, orders, part.nbytes)]
    return [spread(lambda order, n: ring(order, size - 1, n), orders, share)]
