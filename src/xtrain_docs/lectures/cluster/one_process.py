"""The page on how a cluster works: the timeline of its program on three ranks."""

import runpy

from xtrain.cluster import VirtualCluster, flat
from xtrain.cluster.draw import timeline_svg

from ... import config, runs
from ...figures import REGISTRY as FIGURES

PROGRAM = "snippets/cluster/who_is_next.py"


def drawn() -> str:
    program = runpy.run_path(str(config.ROOT / PROGRAM))["pass_along"]
    cluster = VirtualCluster(3, flat(2e-6, 1e9), record=True)
    cluster.run(program)
    assert cluster.record is not None
    return timeline_svg(cluster.record, "A message over three ranks", width=560)


@FIGURES
def three_ranks() -> str:
    (svg,) = runs.remembered(drawn, 1)
    return svg
