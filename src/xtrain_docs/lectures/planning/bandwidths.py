"""Bandwidths of the page on communication math: factors, measurements and links."""

from xtrain.plan import (
    algorithm_bandwidth,
    bus_bandwidth,
)

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...values import si, value
from .communication import A100_TIMES, MICRO, RANKS

GB = 1e9
NODES = (1, 2, 4, 8, 16, 32, 64)
BY_NODES = {  # bus bandwidth of 256 MB in GB/s on nodes of 8 H100
    "all-reduce": (436, 362, 160, 99.6, 84.7, 64.9, 32.9),
    "all-gather": (250, 185, 119, 69, 55, 28, 11),
}


@FIGURES
def comm_by_nodes() -> str:
    """Measured bus bandwidth of 256 MB over the number of nodes."""
    lines = {
        name: [(float(n), rate * GB) for n, rate in zip(NODES, rates, strict=True)]
        for name, rates in BY_NODES.items()
    }
    return line_chart(
        lines,
        Axis("nodes of 8 H100", "log2", lambda n: f"{n:g}"),
        Axis(
            "bus bandwidth",
            "log",
            lambda rate: si(rate, "B/s"),
            low=10 * GB,
            ticks=[rate * GB for rate in (10, 20, 50, 100, 200, 400)],
        ),
        "Bus bandwidth of 256 MB, measured, by number of nodes",
    )


@value
def comm_algorithm_rate(size: int = 17_179_869_184) -> float:
    """algbw of the largest measured tensor, bytes a second."""
    return algorithm_bandwidth(size, A100_TIMES[size] * MICRO)


@value
def comm_bus_rate(size: int = 17_179_869_184) -> float:
    """Its busbw."""
    return bus_bandwidth("all_reduce", size, A100_TIMES[size] * MICRO, RANKS)
