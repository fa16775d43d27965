"""Bandwidths of the page on communication math: factors, measurements and links."""

from xtrain.plan import (
    Link,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_bandwidth_factor,
    collective_time,
    nccl_hop_seconds,
)

from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, percent, seconds, si, value
from .communication import A100_TIMES, MICRO, RANKS

GB = 1e9
NODES = (1, 2, 4, 8, 16, 32, 64)
BY_NODES = {  # bus bandwidth of 256 MB in GB/s on nodes of 8 H100
    "all-reduce": (436, 362, 160, 99.6, 84.7, 64.9, 32.9),
    "all-gather": (250, 185, 119, 69, 55, 28, 11),
}
FACTORS = (
    ("all-reduce", r"$2\frac{N-1}{N}$", "all_reduce"),
    ("all-gather, reduce-scatter, all-to-all", r"$\frac{N-1}{N}$", "all_gather"),
    ("broadcast, reduce, send", "1", "broadcast"),
    ("all-reduce in the switch (SHARP)", r"$\frac{N-1}{N+1}$", "all_reduce_in_network"),
)


@TABLES
def comm_bus_factors(ranks: tuple[int, ...] = (2, 8, 64)) -> Table:
    """What turns the bandwidth of the algorithm into that of the bus."""
    rows = [
        [name, form, *(number(float(bus_bandwidth_factor(key, n))) for n in ranks)]
        for name, form, key in FACTORS
    ]
    return Table(["collective", "factor", *(f"N = {n}" for n in ranks)], rows, "llrrr")


@TABLES
def comm_measured() -> Table:
    """Published measurements as shares of the link, one way."""
    size = max(A100_TIMES)
    ring = bus_bandwidth("all_reduce", size, A100_TIMES[size] * MICRO, RANKS) / GB
    cases = (
        ("8 A100, all-reduce of 16 GiB", ring, "bus", "nvlink3"),
        ("8 H200, all-reduce, ring", 367.6, "bus", "nvlink4"),
        ("8 H200, all-reduce in the switch", 482.26, "bus", "nvlink4"),
        ("2 H200, copy one way", 396.0, "link", "nvlink4"),
        ("8 MI300X, all-reduce", 312.9, "bus", "xgmi-mi300x"),
        ("2 MI300X", 47.7, "bus", "xgmi-mi300x-peer"),
    )
    rows = []
    for what, rate, kind, name in cases:
        link = Link.preset(name).bandwidth
        rows.append([what, f"{number(rate)} GB/s", kind, name, si(link, "B/s"),
                     percent(rate * GB / link)])  # fmt: skip
    header = ["measured", "rate", "of the", "link", "one way", "share"]
    return Table(header, rows, "lrllrr")


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


PLACES = (
    ("NVLink 3, a node", "nvlink3", 8),
    ("NVLink 4, a node", "nvlink4", 8),
    ("NVLink 5, a node", "nvlink5", 8),
    ("NVLink 5, a rack (NVL72)", "nvlink5", 72),
    ("xGMI, a node of MI300X", "xgmi-mi300x", 8),
    ("InfiniBand HDR, one adapter", "infiniband-hdr", 72),
    ("InfiniBand NDR, one adapter", "infiniband-ndr", 72),
    ("InfiniBand XDR, one adapter", "infiniband-xdr", 72),
)


@TABLES
def comm_links(size: float = GB) -> Table:
    """Links, how many devices they join, and a ring of so many."""
    rows = []
    for name, key, devices in PLACES:
        link, network = Link.preset(key), key.startswith("infiniband")
        alpha = nccl_hop_seconds(network)
        time = collective_time("ring_all_reduce", size, devices, alpha, link.beta)
        rows.append([name, "any number" if network else str(devices),
                     si(link.bandwidth, "B/s"), si(link.duplex, "B/s"),
                     f"{seconds(time)} ({devices} devices)"])  # fmt: skip
    header = [
        "link",
        "joins",
        "one way",
        "both ways",
        f"ring all-reduce, {si(size, 'B')}",
    ]
    return Table(header, rows, "lrrrr")


@value
def comm_algorithm_rate(size: int = 17_179_869_184) -> float:
    """algbw of the largest measured tensor, bytes a second."""
    return algorithm_bandwidth(size, A100_TIMES[size] * MICRO)


@value
def comm_bus_rate(size: int = 17_179_869_184) -> float:
    """Its busbw."""
    return bus_bandwidth("all_reduce", size, A100_TIMES[size] * MICRO, RANKS)
