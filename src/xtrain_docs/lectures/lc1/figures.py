"""Charts of the lc1 pages on times: the alpha-beta model, and NCCL's own."""

from xtrain.plan import (
    Link,
    collective_time,
    crossover,
    hierarchical_time,
    nccl_all_reduce_time,
)

from ... import values
from ...figures import REGISTRY
from ...svg import Axis, line_chart

ALL_REDUCES = ("ring", "halving_doubling", "tree", "one_shot")


def _sizes(first: int, last: int, per_octave: int = 1) -> list[float]:
    steps = range(first * per_octave, last * per_octave + 1)
    return [2 ** (step / per_octave) for step in steps]


@REGISTRY
def when_ring(ranks: int = 8, alpha: float = 5e-6, bandwidth: float = 50e9) -> str:
    """Time of four all-reduces over message size, with the ring's crossovers."""
    beta = 1 / bandwidth
    lines = {
        name.replace("_", "-"): [
            (n, collective_time(f"{name}_all_reduce", n, ranks, alpha, beta))
            for n in _sizes(8, 30)
        ]
        for name in ALL_REDUCES
    }
    meet = crossover("tree_all_reduce", "ring_all_reduce", ranks, alpha, beta)
    return line_chart(
        lines,
        Axis("tensor", "log2", values.bytes_, ticks=[2.0**i for i in range(10, 31, 5)]),
        Axis("time", "log", values.seconds),
        f"Time of an all-reduce among {ranks} ranks",
        f"alpha {alpha * 1e6:g} us, {bandwidth / 1e9:g} GB/s; tree and ring meet at "
        f"{values.bytes_(meet)}",
        marks=[(meet, f"tree = ring: {values.bytes_(meet)}")],
    )


@REGISTRY
def nccl_choice(ranks: int = 64, nodes: int = 8, bandwidth: float = 100e9) -> str:
    """What NCCL's model expects of its ring and its double tree."""
    lines = {
        name: [
            (n, nccl_all_reduce_time(name, n, ranks, nodes, bandwidth))
            for n in _sizes(12, 33)
        ]
        for name in ("ring", "tree")
    }
    meet = next(
        (n for n in _sizes(12, 40, 512) if _nccl_ring_wins(n, ranks, nodes, bandwidth)),
        2.0**40,
    )
    return line_chart(
        lines,
        Axis("tensor", "log2", values.bytes_, ticks=[2.0**i for i in range(15, 34, 5)]),
        Axis("time", "log", values.seconds),
        f"NCCL's own estimate for {ranks} GPUs on {nodes} nodes",
        f"{bandwidth / 1e9:g} GB/s; they meet at about {values.bytes_(meet)}",
        marks=[(meet, f"tree = ring: about {values.bytes_(meet)}")],
    )


def _nccl_ring_wins(size: float, ranks: int, nodes: int, bandwidth: float) -> bool:
    ring, tree = (
        nccl_all_reduce_time(name, size, ranks, nodes, bandwidth)
        for name in ("ring", "tree")
    )
    return ring < tree


@REGISTRY
def tree_ring_crossover(bandwidth: float = 50e9) -> str:
    """The size from which the ring beats the tree, over the number of ranks."""
    counts = [2**i for i in range(2, 13)]
    lines = {}
    for alpha in (1e-6, 5e-6, 25e-6):
        lines[f"alpha {alpha * 1e6:g} us"] = [
            (
                p,
                crossover(
                    "tree_all_reduce", "ring_all_reduce", p, alpha, 1 / bandwidth
                ),
            )
            for p in counts
        ]
    return line_chart(
        lines,
        Axis("ranks", "log2", lambda p: f"{p:g}"),
        Axis("tensor", "log2", values.bytes_),
        "Above the line the ring is faster, below it the tree",
        f"Links of {bandwidth / 1e9:g} GB/s.",
    )


@REGISTRY
def flat_or_hierarchical(
    local_ranks: int = 8,
    size: float = 2**30,
    alpha: float = 10e-6,
    intra: str = "nvlink4",
    inter: str = "infiniband-ndr",
) -> str:
    """Time of a flat ring and of the hierarchical all-reduce, over the nodes."""
    inside, across = Link.preset(intra), Link.preset(inter)
    counts = [2**i for i in range(1, 8)]
    lines = {
        "flat ring": [
            (k, collective_time("ring_all_reduce", size, k * local_ranks, alpha,
                                across.beta))
            for k in counts
        ],
        "hierarchical": [
            (k, hierarchical_time(size, local_ranks, k, (alpha, inside.beta),
                                  (alpha, across.beta)))
            for k in counts
        ],
    }  # fmt: skip
    return line_chart(
        lines,
        Axis("nodes", "log2", lambda k: f"{k:g}"),
        Axis("time", "linear", values.seconds),
        f"All-reduce of {values.bytes_(size)}, {local_ranks} ranks a node",
        f"{intra} inside a node, {inter} between nodes.",
    )
