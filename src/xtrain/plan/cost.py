"""How long a collective takes: the alpha-beta model, and nccl-tests' bandwidths.

One message of n bytes takes `alpha + n * beta` seconds: a fixed price per message
and a price per byte (beta = 1 / bandwidth). Adding up n received bytes costs `n *
gamma`. Links work in both directions at once and nobody else uses them. Then every
algorithm below is a straight line in the size, `Cost(messages, volume, reduced)`:

    time(n) = messages * alpha + volume * n * beta + reduced * n * gamma

so that two algorithms meet at exactly one size, which `crossover` solves for. The
size n is that of the FULL tensor: what an all-gather ends with, what a
reduce-scatter starts from, one rank's whole input of an all-to-all.

Sources: Thakur, Rabenseifner and Gropp, IJHPCA 19(1), 2005; the comments of MPICH;
the PERFORMANCE document of nccl-tests; double tree: Sanders, Speck and Traeff,
2009.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import inf

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
    if algorithm not in COSTS:
        known = ", ".join(sorted(COSTS))
        raise ValueError(f"unknown algorithm {algorithm!r}; known: {known}")
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


# ---------------------------------------- bandwidths as nccl-tests prints them


def algorithm_bandwidth(bytes: float, seconds: float) -> float:
    """algbw, bytes/s: the full tensor over the time. Falls as ranks grow."""
    return bytes / seconds


def bus_bandwidth_factor(collective: str, ranks: int) -> Fraction:
    """What turns algbw into busbw, the rate that compares with one link's.

    `bytes` is then the full tensor: the larger of input and output.
    "all_reduce_in_network" is the factor for switches that add up (SHARP).
    """
    factors = {
        "all_reduce": Fraction(2 * (ranks - 1), ranks),
        "all_reduce_in_network": Fraction(ranks - 1, ranks + 1),
        "reduce_scatter": Fraction(ranks - 1, ranks),
        "all_gather": Fraction(ranks - 1, ranks),
        "all_to_all": Fraction(ranks - 1, ranks),
        "gather": Fraction(ranks - 1, ranks),
        "scatter": Fraction(ranks - 1, ranks),
        "broadcast": Fraction(1),
        "reduce": Fraction(1),
        "send_recv": Fraction(1),
    }
    if collective not in factors:
        known = ", ".join(factors)
        raise ValueError(f"unknown collective {collective!r}; known: {known}")
    return factors[collective]


def bus_bandwidth(collective: str, bytes: float, seconds: float, ranks: int) -> float:
    """busbw, bytes/s: algbw of the full tensor times the factor of the collective."""
    factor = float(bus_bandwidth_factor(collective, ranks))
    return algorithm_bandwidth(bytes, seconds) * factor


# ----------------------------------------------------- NCCL's own choice, in short

NCCL_PROTOCOLS = ("LL", "LL128", "Simple")
# For each protocol (ring, tree): microseconds of a call, of a hop over NVLink and over
# the network; then the share of the bus that its payload gets.
_NCCL_BASE = {"LL": (6.6, 6.8), "LL128": (14.0, 14.0), "Simple": (8.4, 8.4)}
_NCCL_NVLINK = {"LL": (0.6, 0.6), "LL128": (1.9, 1.25), "Simple": (3.4, 4.0)}
_NCCL_NETWORK = {"LL": (2.7, 5.0), "LL128": (4.0, 8.5), "Simple": (14.0, 14.0)}
_NCCL_SHARE = {"LL": (0.5, 1 / 3.8), "LL128": (0.92, 120 / 128), "Simple": (1.0, 1.0)}


def nccl_all_reduce_time(
    algorithm: str,
    bytes: float,
    ranks: int,
    nodes: int,
    bus_bandwidth: float,
    protocol: str | None = None,
) -> float:
    """Seconds that NCCL's tuner expects of an all-reduce over NVLink and a network.

    The model of NCCL 2.28's src/graph/tuning.cc, time = latency + size / algbw, without
    its corrections by size (so the tree looks a little too good), its ceilings by GPU
    generation and the latency of switches. `algorithm` is "ring" or "tree",
    `bus_bandwidth` in bytes/s, `ranks` a multiple of `nodes`. Without a `protocol` it
    is the fastest of the three, which is the one that NCCL would take.
    """
    if protocol is None:
        return min(
            nccl_all_reduce_time(algorithm, bytes, ranks, nodes, bus_bandwidth, name)
            for name in NCCL_PROTOCOLS
        )
    if algorithm not in ("ring", "tree") or protocol not in NCCL_PROTOCOLS:
        raise ValueError(f"unknown algorithm {algorithm!r} or protocol {protocol!r}")
    if ranks % nodes:
        raise ValueError(f"{ranks} ranks do not divide among {nodes} nodes")
    tree = int(algorithm == "tree")
    base, local, network, share = (
        table[protocol][tree]
        for table in (_NCCL_BASE, _NCCL_NVLINK, _NCCL_NETWORK, _NCCL_SHARE)
    )
    if tree and protocol == "LL128" and nodes == 1:
        share = 7 / 9
    if tree:
        hops = (ranks // nodes - 1) * local + ceil_log2(nodes) * network
        microseconds = base + 2 * hops
        rate = 0.92 * share * bus_bandwidth / 2
    else:
        steps, crossings = 2 * (ranks - 1), 2 * (nodes - 1) if nodes > 1 else 0
        microseconds = base + (steps - crossings) * local + crossings * network
        rate = share * bus_bandwidth * ranks / steps
    return microseconds * 1e-6 + bytes / rate


def nccl_hop_seconds(network: bool, protocol: str = "Simple") -> float:
    """What NCCL's tuner takes a ring's message to cost before its bytes: the alpha.

    Over the network, or over NVLink.
    """
    if protocol not in NCCL_PROTOCOLS:
        raise ValueError(f"unknown protocol {protocol!r}; known: {NCCL_PROTOCOLS}")
    table = _NCCL_NETWORK if network else _NCCL_NVLINK
    return table[protocol][0] * 1e-6


def nccl_protocol(
    algorithm: str, bytes: float, ranks: int, nodes: int, bus_bandwidth: float
) -> str:
    """The protocol with the least `nccl_all_reduce_time`: "LL", "LL128" or "Simple"."""
    return min(
        NCCL_PROTOCOLS,
        key=lambda name: nccl_all_reduce_time(
            algorithm, bytes, ranks, nodes, bus_bandwidth, name
        ),
    )
