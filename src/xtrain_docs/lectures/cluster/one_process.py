"""The page on how a cluster works: its programs as timelines, and times by formula."""

import runpy
from typing import Any

from xtrain.cluster import Topology, VirtualCluster, dgx_h100, flat
from xtrain.cluster.draw import timeline_svg
from xtrain.cluster.topology import NETWORK_LATENCY, NODE, NVLINK_LATENCY
from xtrain.plan.hardware import Accelerator

from ... import config, runs
from ...figures import REGISTRY as FIGURES
from ...values import value

GPU = Accelerator.preset("h100")
NBYTES = 4_000_000  # of the tensor that two_nodes.py sums


def program(name: str, function: str) -> Any:
    """A function of a program of the page."""
    file = config.ROOT / "snippets/cluster" / name
    return runpy.run_path(str(file))[function]


def drawn(title: str, size: int, topology: Topology, fn: Any, *arguments: Any) -> str:
    cluster = VirtualCluster(size, topology, record=True)
    cluster.run(fn, *arguments)
    assert cluster.record is not None
    return timeline_svg(cluster.record, title, width=480)


def draw_three_ranks() -> str:
    fn = program("who_is_next.py", "pass_along")
    return drawn("A message over three ranks", 3, flat(2e-6, 1e9), fn)


def draw_two_nodes() -> str:
    fn = program("two_nodes.py", "sum_over_nodes")
    return drawn("A sum over two nodes", 2 * NODE, dgx_h100(2), fn, True)


@FIGURES
def three_ranks() -> str:
    (svg,) = runs.remembered(draw_three_ranks, 1)
    return svg


@FIGURES
def two_nodes() -> str:
    (svg,) = runs.remembered(draw_two_nodes, 1)
    return svg


@value
def step_seconds(step: str = "") -> float:
    """Virtual seconds of a step of two_nodes.py by its formula; of all without one."""
    assert GPU.network is not None
    nvlink = NBYTES / GPU.link.bandwidth
    network = NBYTES / GPU.network.bandwidth
    seconds = {
        "all_reduce": 6 * NVLINK_LATENCY + 2 * nvlink,
        "messages": 2 * (NETWORK_LATENCY + network),
        "broadcast": 7 * NVLINK_LATENCY + nvlink,
    }
    return seconds[step] if step else sum(seconds.values())
