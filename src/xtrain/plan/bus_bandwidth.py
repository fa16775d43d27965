"""The bandwidths that nccl-tests prints: of the algorithm, and of the bus.

    algbw = bytes / seconds
    busbw = algbw * factor       2(p-1)/p for an all-reduce, (p-1)/p for its two halves

busbw compares with the bandwidth of one link, whatever the number of ranks.

Source: the PERFORMANCE document of nccl-tests.
"""

from fractions import Fraction


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
