"""The page on communication math: the alpha-beta model, bandwidths and links."""

from xtrain.plan import (
    Link,
    algorithm_bandwidth,
    bus_bandwidth,
    bus_bandwidth_factor,
    collective_cost,
    collective_time,
    nccl_hop_seconds,
)

from ... import values
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import number, percent, si, value

GB, MICRO = 1e9, 1e-6
RANKS = 8
A100_TIMES = {  # nccl-tests' all_reduce_perf on 8 A100: bytes, microseconds
    32_768: 43.83, 131_072: 51.76, 524_288: 80.40, 1_048_576: 101.9,
    4_194_304: 101.5, 8_388_608: 133.5, 33_554_432: 424.0, 134_217_728: 1327.6,
    536_870_912: 4218.4, 2_147_483_648: 16_240.0, 17_179_869_184: 127_997.0,
}  # fmt: skip
NODES = (1, 2, 4, 8, 16, 32, 64)
BY_NODES = {  # bus bandwidth of 256 MB in GB/s on nodes of 8 H100
    "all-reduce": (436, 362, 160, 99.6, 84.7, 64.9, 32.9),
    "all-gather": (250, 185, 119, 69, 55, 28, 11),
}
ALGORITHMS = {
    "ring": "ring_all_reduce",
    "halving-doubling": "halving_doubling_all_reduce",
    "tree": "tree_all_reduce",
    "recursive doubling": "recursive_doubling_all_reduce",
}


# --------------------------------------------------------------- alpha and beta


def fitted() -> tuple[float, float]:
    """Alpha from the smallest measured tensor, beta from the largest, as a ring's."""
    small, large = min(A100_TIMES), max(A100_TIMES)
    ring = collective_cost("ring_all_reduce", RANKS)
    beta = A100_TIMES[large] * MICRO / large / float(ring.volume)
    return A100_TIMES[small] * MICRO / ring.messages, beta


@value
def comm_fitted_alpha() -> float:
    """Seconds a message, of the smallest measured tensor."""
    return fitted()[0]


@value
def comm_fitted_bandwidth() -> float:
    """Bytes a second, of the largest."""
    return 1 / fitted()[1]


@FIGURES
def alpha_beta_measured() -> str:
    """Four algorithms by the model, and what eight A100 took."""
    alpha, beta = fitted()
    sizes = [2.0**power for power in range(15, 35)]
    lines = {
        name: [
            (size, collective_time(algorithm, size, RANKS, alpha, beta))
            for size in sizes
        ]
        for name, algorithm in ALGORITHMS.items()
    }
    lines["measured"] = [(size, us * MICRO) for size, us in A100_TIMES.items()]
    return line_chart(
        lines,
        Axis("tensor", "log2", values.bytes_, ticks=[2.0**i for i in range(15, 35, 5)]),
        Axis("time", "log", values.seconds),
        f"Time of an all-reduce among {RANKS} ranks",
        "The model's line of a ring goes through the first and the last measurement.",
    )


COLLECTIVES = (
    ("broadcast, tree", "what all end with", r"$\lceil\log_2 N\rceil M$",
     r"$\lceil\log_2 N\rceil$", "broadcast"),
    ("all-gather, ring", "what all end with", r"$\frac{N-1}{N} M$", "$N-1$",
     "ring_all_gather"),
    ("reduce-scatter, ring", "what each starts with", r"$\frac{N-1}{N} M$", "$N-1$",
     "ring_reduce_scatter"),
    ("all-to-all", "what each starts with", r"$\frac{N-1}{N} M$", "$N-1$",
     "all_to_all"),
    ("all-reduce, ring", "what all have", r"$2\frac{N-1}{N} M$", "$2(N-1)$",
     "ring_all_reduce"),
    ("all-reduce, halving-doubling", "what all have", r"$2\frac{N-1}{N} M$",
     r"$2\log_2 N$", "halving_doubling_all_reduce"),
    ("all-reduce, recursive doubling", "what all have", r"$M \log_2 N$",
     r"$\log_2 N$", "recursive_doubling_all_reduce"),
    ("all-reduce, tree", "what all have", r"$2 M \lceil\log_2 N\rceil$",
     r"$2\lceil\log_2 N\rceil$", "tree_all_reduce"),
    ("all-reduce, two pipelined trees", "what all have", "$2M$",
     r"$2\lceil\log_2 N\rceil$", "double_tree_all_reduce"),
    ("all-reduce, all to everybody", "what all have", "$(N-1) M$", "$N-1$",
     "one_shot_all_reduce"),
)  # fmt: skip


@TABLES
def comm_collectives(ranks: int = 8) -> Table:
    """Closed forms of bytes and messages one after another, and their values."""
    rows = []
    for name, size, volume, messages, algorithm in COLLECTIVES:
        cost = collective_cost(algorithm, ranks)
        rows.append(
            [name, size, volume, f"{number(float(cost.volume))} M", messages,
             str(cost.messages)]
        )  # fmt: skip
    header = ["collective", "M is the size of", "bytes", f"N = {ranks}", "messages",
              f"N = {ranks}"]  # fmt: skip
    return Table(header, rows, "lllrlr")


# ------------------------------------------------------------------- bandwidths

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
            lambda rate: values.si(rate, "B/s"),
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
                     f"{values.seconds(time)} ({devices} devices)"])  # fmt: skip
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


@value
def comm_model_error(size: int) -> float:
    """The model's time of a measured size over the measured one."""
    time = collective_time("ring_all_reduce", size, RANKS, *fitted())
    return time / (A100_TIMES[size] * MICRO)
