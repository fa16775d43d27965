"""The page on all-reduce at 1,024 ranks: recorded times, and the closed forms."""

from functools import cache
from math import log2
from typing import Any

from xtrain.bench.cluster_all_reduce import FLAT, GIB, KIB, MIB, NODES, all_reduce
from xtrain.cluster import VirtualCluster, dgx_h100
from xtrain.cluster.heat import heat_svg
from xtrain.cluster.recorder import LinkUse, RunRecord
from xtrain.cluster.topology import NETWORK_LATENCY, NODE, NVLINK_LATENCY
from xtrain.plan import collective_time, hierarchical_time
from xtrain.plan.hardware import Accelerator

from ... import runs
from ...amounts import bytes_ as as_bytes
from ...amounts import seconds as as_seconds
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .clock import recorded as record_of

RANKS, HEAT_RANKS = 1024, 64
ALPHA, BETA = 5e-6, 1 / 50e9
GPU = Accelerator.preset("h100")
INSIDE = NVLINK_LATENCY, GPU.link.beta  # alpha and beta of the links in a node
BETWEEN = NETWORK_LATENCY, GPU.network.beta if GPU.network else 0.0
TITLES = {
    "ring": "ring", "tree": "tree", "halving_doubling": "halving-doubling",
    "hierarchical": "hierarchical",
}  # fmt: skip
SIZES = [2.0**power for power in range(12, 34)]
SHOWN = 4 * KIB, 32 * MIB, GIB


@cache
def recorded() -> dict[tuple[str, str, int], dict[int, float]]:
    """Virtual seconds by algorithm, topology and ranks, then by bytes."""
    found: dict[tuple[str, str, int], dict[int, float]] = {}
    for row in record_of("all_reduce.json"):
        of = row["algorithm"], row["topology"], row["ranks"]
        found.setdefault(of, {})[row["bytes"]] = row["seconds"]
    return found


@value
def all_reduce_recorded(
    algorithm: str, size: int, ranks: int = RANKS, nodes: bool = False
) -> float:
    """The virtual seconds of a run."""
    return recorded()[algorithm, NODES if nodes else FLAT, ranks][size]


@value
def all_reduce_formula(
    algorithm: str, size: float, ranks: int = RANKS, nodes: bool = False
) -> float:
    """The closed form: on equal links, or on nodes of eight."""
    if not nodes:
        return collective_time(f"{algorithm}_all_reduce", size, ranks, ALPHA, BETA)
    return ON_NODES[algorithm](size, ranks // NODE)


def ring_on_nodes(size: float, nodes: int) -> float:
    """Reduce-scatter: each step waits for a link between nodes. All-gather, whose
    receives are posted ahead: a chunk's way around, or all chunks through that link."""
    ranks = NODE * nodes
    fast, slow = (alpha + size / ranks * beta for alpha, beta in (INSIDE, BETWEEN))
    around = nodes * slow + (ranks - 1 - nodes) * fast
    through = BETWEEN[0] + (ranks - 1) * size / ranks * BETWEEN[1]
    return (ranks - 1) * slow + max(around, through)


def tree_on_nodes(size: float, nodes: int) -> float:
    """Up and down: 3 steps inside nodes, the others between them."""
    fast, slow = (alpha + size * beta for alpha, beta in (INSIDE, BETWEEN))
    return 2 * (log2(NODE) * fast + log2(nodes) * slow)


def halving_doubling_on_nodes(size: float, nodes: int) -> float:
    """The large halves go between nodes, every GPU by its own adapter."""
    latency = log2(NODE) * INSIDE[0] + log2(nodes) * BETWEEN[0]
    far = size * (1 - 1 / nodes) * BETWEEN[1]
    near = size / nodes * (1 - 1 / NODE) * INSIDE[1]
    return 2 * (latency + far + near)


def hierarchical_on_nodes(size: float, nodes: int) -> float:
    return hierarchical_time(size, NODE, nodes, INSIDE, BETWEEN)


ON_NODES = {
    "ring": ring_on_nodes, "tree": tree_on_nodes,
    "halving_doubling": halving_doubling_on_nodes,
    "hierarchical": hierarchical_on_nodes,
}  # fmt: skip


@value
def all_reduce_crossover(one: str, other: str, ranks: int = RANKS) -> float:
    """The bytes at which two algorithms take as long on nodes: lines cross once."""
    (a, one_slope), (b, other_slope) = (
        (start, (all_reduce_formula(name, GIB, ranks, True) - start) / GIB)
        for name in (one, other)
        for start in [all_reduce_formula(name, 0, ranks, True)]
    )
    return (b - a) / (one_slope - other_slope)


@FIGURES
def all_reduce_times(nodes: bool = False, ranks: int = RANKS) -> str:
    """Closed forms as lines, recorded runs as dots."""
    algorithms = [name for name in TITLES if nodes or name != "hierarchical"]
    lines = {
        TITLES[name]: [(n, all_reduce_formula(name, n, ranks, nodes)) for n in SIZES]
        for name in algorithms
    }
    topology = NODES if nodes else FLAT
    dots = {
        TITLES[name]: sorted(recorded()[name, topology, ranks].items())
        for name in algorithms
    }
    where = f"on {ranks // NODE} nodes of 8 H100" if nodes else "links of 50 GB/s, 5 us"
    return line_chart(
        lines,
        Axis("tensor", "log2", as_bytes, ticks=[2.0**n for n in range(12, 34, 7)]),
        Axis("time", "log", as_seconds),
        f"All-reduce among {ranks:,} ranks, {where}",
        "Lines are closed forms, dots are runs.",
        dots=dots,
    )


@TABLES
def all_reduce_runs(nodes: bool = False, ranks: int = RANKS) -> Table:
    """Each recorded run beside its closed form."""
    rows = []
    for name in TITLES:
        topology = NODES if nodes else FLAT
        for size, took in sorted(recorded().get((name, topology, ranks), {}).items()):
            if size not in SHOWN:
                continue
            formula = all_reduce_formula(name, size, ranks, nodes)
            off = abs(took / formula - 1)
            rows.append(
                [TITLES[name], as_bytes(size), as_seconds(took, 4),
                 as_seconds(formula, 4), f"{off:.0e}" if off else "0"]
            )  # fmt: skip
    header = ["algorithm", "tensor", "run", "closed form", "relative difference"]
    return Table(header, rows, "lrrrr")


# -- the links of the nodes ------------------------------------------------------------


def links_of(algorithm: str, ranks: int, size: int) -> dict[str, Any]:
    """Which links an all-reduce on nodes uses, and its virtual seconds."""
    nodes = dgx_h100(ranks // NODE)
    cluster = VirtualCluster(ranks, nodes, checks=False, record=True)
    cluster.run(all_reduce, algorithm, size)
    record = cluster.record
    assert record is not None
    links = {name: list(use) for name, use in record.links.items()}
    return {"seconds": record.makespan, "links": links}


@FIGURES
def all_reduce_links(algorithm: str = "ring") -> str:
    """A cell for each link of 8 nodes, during an all-reduce of 1 GiB."""
    (found,) = runs.remembered(links_of, 1, algorithm, HEAT_RANKS, GIB)
    links = {name: LinkUse(*use) for name, use in found["links"].items()}
    record = RunRecord([found["seconds"]], [[]], [], links)
    return heat_svg(record, f"Links during a {TITLES[algorithm]} all-reduce")
