"""A virtual cluster: many ranks in one process, exact messages, a virtual clock.

cluster = VirtualCluster(1024, flat(latency=5e-6, bandwidth=50e9))
results = cluster.run(program)  # one result per rank
cluster.seconds                 # each rank's virtual clock
"""

from xtrain.cluster.backend import register
from xtrain.cluster.checks import InFlightError, UnfinishedWork
from xtrain.cluster.clock import advance, now
from xtrain.cluster.collectives import MismatchedCollectives
from xtrain.cluster.deadlock import Deadlock, PeerEnded
from xtrain.cluster.recorder import RunRecord
from xtrain.cluster.topology import (
    Topology,
    dgx_h100,
    fat_tree,
    flat,
    nvlink,
    table,
    tpu_torus,
)
from xtrain.cluster.virtual_cluster import VirtualCluster

__all__ = [
    "Deadlock",
    "InFlightError",
    "MismatchedCollectives",
    "PeerEnded",
    "RunRecord",
    "Topology",
    "UnfinishedWork",
    "VirtualCluster",
    "advance",
    "dgx_h100",
    "fat_tree",
    "flat",
    "now",
    "nvlink",
    "register",
    "table",
    "tpu_torus",
]
