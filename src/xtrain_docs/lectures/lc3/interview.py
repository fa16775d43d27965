"""Tables of the lc3 interview page: what a stage costs on a link."""

from xtrain.plan import Link, collective_time

from ...tables import REGISTRY, Table
from ...values import seconds

us = 1e-6
LINKS = (
    ("NVLink 4, in a node", 8, "nvlink4"),
    ("InfiniBand NDR", 64, "infiniband-ndr"),
    ("InfiniBand EDR", 64, "infiniband-edr"),
    ("InfiniBand NDR", 512, "infiniband-ndr"),
)


def stage_seconds(
    weights: float, layers: int, ranks: int, alpha: float, beta: float
) -> dict[str, float]:
    """Communication of a step: in one piece (stages 1, 2) and layer by layer (3)."""
    gather, reduce = (
        (lambda size, name=name: collective_time(name, size, ranks, alpha, beta))
        for name in ("ring_all_gather", "ring_reduce_scatter")
    )
    each = weights / layers
    return {
        "two": gather(weights) + reduce(weights),
        "three": layers * (2 * gather(each) + reduce(each)),
        "latency": 3 * layers * (ranks - 1) * alpha,
    }


@REGISTRY
def stage_times(
    billions: float = 7, layers: int = 32, alpha_us: float = 5, itemsize: int = 2
) -> Table:
    """Seconds of communication of a step: stages 1 and 2 against stage 3."""
    rows = []
    for words, ranks, link in LINKS:
        beta = Link.preset(link).beta
        found = stage_seconds(
            billions * 1e9 * itemsize, layers, ranks, alpha_us * us, beta
        )
        rows.append([words, str(ranks), seconds(found["two"]),
                     seconds(found["three"]), seconds(found["latency"])])  # fmt: skip
    header = ["link", "ranks", "stages 1 and 2", "stage 3", "of it latency"]
    return Table(header, rows, "lrrrr")
