"""Tables of the lc1 interview page: growth, crossovers, hubs, ZeRO, two levels."""

from xtrain.plan import (
    Link,
    all_reduce_lower_bound,
    collective_cost,
    collective_time,
    collective_traffic,
    crossover,
    hierarchical_between_nodes,
    hierarchical_time,
)

from ...evidence import WORLD_SIZES
from ...tables import REGISTRY, Table
from ...values import KiB, MiB, bytes_, digits, seconds, si, times
from .measured import M_BYTES, compare

TREE, RING = "tree_all_reduce", "ring_all_reduce"
GB, us = 1e9, 1e-6


@REGISTRY
def ring_growth(alpha_us: float = 5) -> Table:
    """What grows with the number of ranks in a ring all-reduce, and what does not."""
    rows = []
    for ranks in (2, 4, 8, 64, 1024):
        cost = collective_cost(RING, ranks)
        rows.append(
            [
                str(ranks),
                f"{digits(float(cost.volume), 4)} M",
                str(cost.messages),
                seconds(cost.messages * alpha_us * us),
            ]
        )
    header = ["ranks", "each rank sends", "steps", "time of the steps alone"]
    return Table(header, rows, "rrrr")


@REGISTRY
def tree_or_ring(alpha_us: float = 5, gigabytes: float = 50) -> Table:
    """Where tree and ring take equally long, and by how much each wins elsewhere."""
    alpha, beta = alpha_us * us, 1 / (gigabytes * GB)
    rows = []
    for ranks in (4, 8, 64, 512):
        small, large = (
            collective_time(TREE, size, ranks, alpha, beta)
            / collective_time(RING, size, ranks, alpha, beta)
            for size in (4 * KiB, 1024 * MiB)
        )
        rows.append(
            [
                str(ranks),
                str(collective_cost(TREE, ranks).messages),
                str(collective_cost(RING, ranks).messages),
                si(crossover(TREE, RING, ranks, alpha, beta), "B"),
                times(1 / small),
                times(large),
            ]
        )
    header = ["ranks", "steps, tree", "steps, ring", "equal at",
              f"tree faster at {bytes_(4 * KiB)}",
              f"ring faster at {bytes_(1024 * MiB)}"]  # fmt: skip
    return Table(header, rows, "rrrrrr")


@REGISTRY
def hub_or_ring() -> Table:
    """Measured bytes of the busiest rank: parameter server and ring."""
    rows = []
    for ranks in WORLD_SIZES:
        hub, ring = (
            max(compare(name, ranks)["sent"])
            for name in ("parameter_server_all_reduce", RING)
        )
        rows.append(
            [
                str(ranks),
                f"{digits(hub / M_BYTES)} M",
                f"{digits(ring / M_BYTES)} M",
                times(hub / ring),
            ]
        )
    header = ["ranks", "server sends", "a rank of the ring sends", "ratio"]
    return Table(header, rows, "rrrr")


@REGISTRY
def zero_collectives(ranks: int = 8) -> Table:
    """What one step of data parallelism and of each ZeRO stage sends per rank."""
    numel = 64 * ranks
    reduce_scatter = collective_traffic("ring_reduce_scatter", numel, ranks)
    all_gather = collective_traffic("ring_all_gather", numel, ranks)
    all_reduce = collective_traffic(RING, numel, ranks)
    plans = {
        "data parallel": ("all-reduce of gradients", all_reduce),
        "stages 1 and 2": (
            "reduce-scatter of gradients, all-gather of parameters",
            reduce_scatter.then(all_gather),
        ),
        "stage 3": (
            "all-gather in forward, all-gather in backward, reduce-scatter",
            all_gather.then(all_gather).then(reduce_scatter),
        ),
    }
    rows = [
        [
            name,
            calls,
            f"${digits(traffic.max_sent / numel, 4)}\\,\\Phi$",
            times(traffic.max_sent / all_reduce.max_sent),
        ]
        for name, (calls, traffic) in plans.items()
    ]
    header = ["", "collectives", f"sent per rank, {ranks} ranks", "of data parallel"]
    return Table(header, rows, "llrr")


@REGISTRY
def two_levels(local: int = 8, mebibytes: int = 256, alpha_us: float = 5) -> Table:
    """One flat ring over the slow link against the hierarchical all-reduce."""
    size = mebibytes * MiB
    fast, slow = Link.preset("nvlink4"), Link.preset("infiniband-ndr")
    rows = []
    for nodes in (2, 4, 16, 64):
        ranks = local * nodes
        flat = collective_time(RING, size, ranks, alpha_us * us, slow.beta)
        layered = hierarchical_time(
            size, local, nodes, (alpha_us * us, fast.beta), (alpha_us * us, slow.beta)
        )
        leaving = hierarchical_between_nodes(size, ranks, local).max_sent
        rows.append(
            [
                str(ranks),
                bytes_(float(all_reduce_lower_bound(ranks) * size)),
                bytes_(leaving),
                seconds(flat),
                seconds(layered),
                times(flat / layered),
            ]
        )
    header = ["ranks", "over a slow link, flat ring", "two levels",
              "time, flat ring", "two levels", "gain"]  # fmt: skip
    return Table(header, rows, "rrrrrr")
