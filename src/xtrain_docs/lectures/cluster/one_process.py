"""The page on how the cluster works: a ring on four ranks, as it was recorded."""

import torch

from xtrain.cluster import VirtualCluster, advance, flat
from xtrain.cluster.draw import timeline_svg
from xtrain.comm import ring_all_reduce

from ... import runs
from ...figures import REGISTRY

RANKS, FLOATS = 4, 250_000
LATENCY, BANDWIDTH = 5e-6, 50e9


def skewed(rank: int, size: int) -> None:
    """Rank 1 computes longest; then all sum a gradient of 1 MB."""
    advance(20e-6 if rank != 1 else 40e-6)
    ring_all_reduce(torch.ones(FLOATS))
    advance(20e-6)


def ring_after_unequal_work() -> str:
    """The timeline of a run, as SVG."""
    cluster = VirtualCluster(RANKS, flat(LATENCY, BANDWIDTH), record=True)
    cluster.run(skewed)
    assert cluster.record is not None
    return timeline_svg(cluster.record, "Unequal work, then a ring all-reduce")


@REGISTRY
def ring_timeline() -> str:
    """Four ranks that compute, wait and send."""
    (drawn,) = runs.remembered(ring_after_unequal_work, 1)
    return drawn
