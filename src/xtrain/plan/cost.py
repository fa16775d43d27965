"""What a collective costs: the coefficients of the alpha-beta model.

One message of n bytes takes `alpha + n * beta` seconds: a fixed price per message
and a price per byte (beta = 1 / bandwidth). Adding up n received bytes costs `n *
gamma`. Links work in both directions at once and carry nothing else. Then every
algorithm below is a straight line in the size, `Cost(messages, volume, reduced)`:

    time(n) = messages * alpha + volume * n * beta + reduced * n * gamma

so that two algorithms meet at exactly one size, the `crossover`: below it the one with
fewer messages wins, above it the one with fewer bytes. The size n
is that of the FULL tensor: what an all-gather ends with, what a reduce-scatter starts
from, one rank's whole input of an all-to-all.

Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; the comments of MPICH;
double tree: Sanders, Speck and Traeff, 2009.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import inf

from xtrain.plan.checks import require_one_of
from xtrain.plan.traffic import ceil_log2


@dataclass(frozen=True, slots=True)
class Cost:
    """The three coefficients of a straight line in the size of the tensor."""

    messages: int
    volume: Fraction
    reduced: Fraction = Fraction(0)

    def time(self, size: float, alpha: float, beta: float, gamma: float = 0) -> float:
        """Seconds for `size` bytes; alpha s/message, beta and gamma s/byte."""
        per_byte = float(self.volume) * beta + float(self.reduced) * gamma
        return self.messages * alpha + size * per_byte


def _ring_half(p: int, reduced: bool) -> Cost:
    share = Fraction(p - 1, p)
    return Cost(p - 1, share, share if reduced else Fraction(0))


def _ring_all_reduce(p: int) -> Cost:
    return Cost(2 * (p - 1), Fraction(2 * (p - 1), p), Fraction(p - 1, p))


def _star(p: int) -> Cost:
    """One piece of 1/p to or from every other rank, one after another."""
    return Cost(p - 1, Fraction(p - 1, p))


def _tree(p: int, times: int, reduced: bool) -> Cost:
    depth = ceil_log2(p)
    share = Fraction(depth if reduced else 0)
    return Cost(times * depth, Fraction(times * depth), share)


def _halving_doubling(p: int) -> Cost:
    """Rabenseifner; a rank count between powers of two pays one extra trip each
    way.

    The first p - 2^k ranks hand their tensor to a neighbour and get the sum back.
    """
    core = 1 << (p.bit_length() - 1)
    depth, share = ceil_log2(core), Fraction(core - 1, core)
    if core == p:
        return Cost(2 * depth, 2 * share, share)
    return Cost(2 * depth + 2, 2 * share + 2, share + 1)


def _power_of_two(p: int, name: str) -> int:
    if p & (p - 1):
        raise ValueError(f"{name} needs a power of two, got {p} ranks")
    return ceil_log2(p)


def _recursive_doubling_all_reduce(p: int) -> Cost:
    depth = _power_of_two(p, "recursive doubling")
    return Cost(depth, Fraction(depth), Fraction(depth))


def _recursive_all_gather(p: int) -> Cost:
    depth = _power_of_two(p, "recursive doubling")
    return Cost(depth, Fraction(p - 1, p))


def _recursive_reduce_scatter(p: int) -> Cost:
    depth = _power_of_two(p, "recursive halving")
    return Cost(depth, Fraction(p - 1, p), Fraction(p - 1, p))


def _van_de_geijn(p: int) -> Cost:
    """Binomial scatter and recursive-doubling all-gather."""
    depth = _power_of_two(p, "recursive doubling")
    return Cost(2 * depth, Fraction(2 * (p - 1), p))


COSTS: dict[str, Callable[[int], Cost]] = {
    "broadcast_naive": lambda p: Cost(p - 1, Fraction(p - 1)),
    "broadcast": lambda p: _tree(p, 1, reduced=False),
    "van_de_geijn_broadcast": _van_de_geijn,
    "reduce": lambda p: _tree(p, 1, reduced=True),
    "gather": _star,
    "scatter": _star,
    "ring_all_gather": lambda p: _ring_half(p, reduced=False),
    "recursive_doubling_all_gather": _recursive_all_gather,
    "bidirectional_ring_all_gather": lambda p: Cost(p // 2, Fraction(p - 1, 2 * p)),
    "ring_reduce_scatter": lambda p: _ring_half(p, reduced=True),
    "recursive_halving_reduce_scatter": _recursive_reduce_scatter,
    "all_to_all": _star,
    "parameter_server_all_reduce": lambda p: Cost(
        2 * (p - 1), Fraction(2 * (p - 1)), Fraction(p - 1)
    ),
    "ring_all_reduce": _ring_all_reduce,
    "tree_all_reduce": lambda p: _tree(p, 2, reduced=True),
    "halving_doubling_all_reduce": _halving_doubling,
    "recursive_doubling_all_reduce": _recursive_doubling_all_reduce,
    "one_shot_all_reduce": lambda p: Cost(p - 1, Fraction(p - 1), Fraction(p - 1)),
    "double_tree_all_reduce": lambda p: Cost(
        2 * ceil_log2(p), Fraction(2), Fraction(1)
    ),
}


def collective_cost(algorithm: str, ranks: int) -> Cost:
    """Coefficients of `algorithm` among `ranks` ranks, per byte of the full tensor.

    ValueError for an unknown name, for fewer than one rank, and for the recursive
    algorithms where `ranks` is not a power of two.
    """
    require_one_of("algorithm", algorithm, COSTS)
    if ranks < 1:
        raise ValueError(f"ranks must be at least 1, got {ranks}")
    if ranks == 1:
        return Cost(0, Fraction(0))
    return COSTS[algorithm](ranks)


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
    first: str, second: str, ranks: int, alpha: float, beta: float, gamma: float = 0.0
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
