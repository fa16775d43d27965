"""How long a collective takes in the alpha-beta model, and which algorithm is faster.

Every algorithm is a straight line in the size (`xtrain.plan.cost`). Two of them meet at
exactly one size, the crossover: below it the algorithm with fewer messages wins, above
it the one with fewer bytes. Sizes are those of the full tensor.
"""

from math import inf

from xtrain.plan.cost import collective_cost


def collective_time(
    algorithm: str,
    bytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
) -> float:
    """Seconds of `algorithm` on a tensor of `bytes` (the full one) among `ranks`.

    alpha: s per message; beta: s per byte on a link; gamma: s per byte added up.
    """
    return collective_cost(algorithm, ranks).time(bytes, alpha, beta, gamma)


def crossover(
    first: str,
    second: str,
    ranks: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
) -> float:
    """The size in bytes of the full tensor at which two algorithms take equally long.

    Below it the one with fewer messages wins, above it the one with fewer bytes. 0
    if one of them is never slower, `inf` if their bytes cost the same.
    """
    a, b = collective_cost(first, ranks), collective_cost(second, ranks)
    latency = (a.messages - b.messages) * alpha
    per_byte = float(b.volume - a.volume) * beta
    per_byte += float(b.reduced - a.reduced) * gamma
    if per_byte == 0:
        return inf if latency else 0.0
    return max(0.0, latency / per_byte)


def fastest(
    algorithms: list[str],
    bytes: float,
    ranks: int,
    alpha: float,
    beta: float,
    gamma: float = 0.0,
) -> str:
    """The name with the least `collective_time` for a full tensor of `bytes`.

    The first one wins a tie.
    """
    return min(
        algorithms,
        key=lambda name: collective_time(name, bytes, ranks, alpha, beta, gamma),
    )


def hierarchical_time(
    bytes: float,
    local_ranks: int,
    nodes: int,
    intra: tuple[float, float],
    inter: tuple[float, float],
    gamma: float = 0.0,
) -> float:
    """All-reduce in three steps: reduce-scatter in the node, all-reduce across,
    gather.

    `bytes` is the full tensor; `intra` and `inter` are (alpha, beta) of the two kinds
    of link. Only 1/local_ranks of the tensor leaves a device towards other nodes.
    """
    steps = (
        ("ring_reduce_scatter", bytes, local_ranks, intra),
        ("ring_all_reduce", bytes / local_ranks, nodes, inter),
        ("ring_all_gather", bytes, local_ranks, intra),
    )
    return sum(
        collective_time(name, size, ranks, *link, gamma)
        for name, size, ranks, link in steps
    )
