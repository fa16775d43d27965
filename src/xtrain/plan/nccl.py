"""NCCL: the bandwidths that nccl-tests prints, the times that its tuner expects.

    algbw = bytes / seconds
    busbw = algbw * factor       2(p-1)/p for an all-reduce, (p-1)/p for its two halves

busbw compares with the bandwidth of one link, whatever the number of ranks.

In the tuner a call has a base latency and every hop one more, over NVLink or over the
network; then the bytes go at a share of the bus that the protocol sets: "LL" and
"LL128" have low latency and waste part of the bus, "Simple" has high latency and
leaves all of it to the payload.

Sources: the PERFORMANCE document of nccl-tests; src/graph/tuning.cc of NCCL 2.28.
"""

from fractions import Fraction

from xtrain.plan.checks import require_one_of
from xtrain.plan.traffic import ceil_log2


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
    require_one_of("collective", collective, factors)
    return factors[collective]


def bus_bandwidth(collective: str, bytes: float, seconds: float, ranks: int) -> float:
    """busbw, bytes/s: algbw of the full tensor times the factor of the collective."""
    factor = float(bus_bandwidth_factor(collective, ranks))
    return algorithm_bandwidth(bytes, seconds) * factor


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
    require_one_of("algorithm", algorithm, ("ring", "tree"))
    require_one_of("protocol", protocol, NCCL_PROTOCOLS)
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
    require_one_of("protocol", protocol, NCCL_PROTOCOLS)
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
