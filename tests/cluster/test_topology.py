"""Topologies: which links a message crosses, and what cannot be built."""

import math
import random
from itertools import permutations

import pytest

from xtrain.cluster import (
    Topology,
    VirtualCluster,
    dgx_h100,
    fat_tree,
    flat,
    nvlink,
    table,
    tpu_torus,
)
from xtrain.cluster.topology import Route
from xtrain.plan.hardware import Accelerator

TOPOLOGY = "xtrain.cluster.topology"
ALL = [
    (nvlink(4), 4), (dgx_h100(2), 16), (fat_tree(3, leaf=2, oversubscription=2), 24),
    (tpu_torus(2, 3), 6), (tpu_torus(5), 5),
    (table(3, {(0, 1): (1, 1), (1, 2): (1, 1)}), 3),
]  # fmt: skip


@pytest.mark.verifies(f"{TOPOLOGY}:Topology", f"{TOPOLOGY}:Route")
@pytest.mark.parametrize(("topology", "size"), ALL)
def test_every_pair_has_a_route_over_links_that_exist(topology, size):
    assert topology.size == size
    used = set()
    for source, target in permutations(range(topology.size), 2):
        route = topology.route(source, target)
        assert route.links and set(route.links) <= set(topology.bandwidth)
        assert len(set(route.links)) == len(route.links) and route.latency > 0
        used.update(route.links)
    assert used == set(topology.bandwidth)


@pytest.mark.verifies(f"{TOPOLOGY}:nvlink")
@pytest.mark.verifies(f"{TOPOLOGY}:dgx_h100")
@pytest.mark.verifies(f"{TOPOLOGY}:fat_tree")
def test_nodes_have_nvlink_inside_and_adapters_between():
    h100 = Accelerator.preset("h100")
    tree = fat_tree(4, leaf=2, oversubscription=2)
    inside = Route(2e-6, ("gpu 1 up", "gpu 7 down"))
    assert (
        nvlink(8).route(1, 7) == dgx_h100(2).route(1, 7) == tree.route(1, 7) == inside
    )
    between = Route(5e-6, ("gpu 1 out", "gpu 9 in"))
    assert dgx_h100(2).route(1, 9) == tree.route(1, 9) == between
    over = ("gpu 1 out", "leaf 0 to spine", "leaf 1 from spine", "gpu 17 in")
    assert tree.route(1, 17) == Route(5e-6, over)
    bandwidths = [tree.bandwidth[link] for link in over]
    adapter = h100.network.bandwidth
    assert bandwidths == [adapter, 16 * adapter / 2, 16 * adapter / 2, adapter]
    assert tree.bandwidth["gpu 1 up"] == h100.link.bandwidth


@pytest.mark.verifies(f"{TOPOLOGY}:tpu_torus")
@pytest.mark.parametrize("shape", [(2,), (3,), (8,), (4, 4), (2, 3, 5)])
def test_a_torus_takes_the_shorter_way_in_every_dimension(shape):
    torus, size = tpu_torus(*shape), math.prod(shape)

    def place(rank):
        found = []
        for count in reversed(shape):
            rank, at = divmod(rank, count)
            found.append(at)
        return found[::-1]

    for source, target in permutations(range(size), 2):
        ends = zip(place(source), place(target), shape, strict=True)
        hops = sum(min((a - b) % count, (b - a) % count) for a, b, count in ends)
        route = torus.route(source, target)
        assert len(route.links) == hops
        assert route.latency == pytest.approx(hops * 1e-6)


@pytest.mark.verifies(f"{TOPOLOGY}:table")
def test_a_table_takes_the_route_of_least_latency():
    """Floyd and Warshall's distances, on random links of two directions."""
    draw, size = random.Random(0), 8
    links = {(r, (r + 1) % size): (draw.random(), 1e9) for r in range(size)}
    for _ in range(10):
        pair = tuple(draw.sample(range(size), 2))
        links.setdefault(pair, (draw.random(), 1e9))
    best = {(a, b): math.inf for a in range(size) for b in range(size) if a != b}
    best |= {pair: latency for pair, (latency, _) in links.items()}
    for k in range(size):
        for a, b in best:
            if k not in (a, b):
                best[a, b] = min(best[a, b], best[a, k] + best[k, b])
    topology = table(size, links, both=False)
    for pair, latency in best.items():
        route = topology.route(*pair)
        assert route.latency == pytest.approx(latency)
        ends = [name.split(" to ") for name in route.links]
        assert sum(links[int(a), int(b)][0] for a, b in ends) == pytest.approx(latency)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flat(-1.0, 1e9), "flat: latency=-1.0 is not a number of seconds"),
        (lambda: flat(math.nan, 1e9), "flat: latency=nan"),
        (lambda: flat(1e-6, 0.0), "flat: bandwidth=0.0 is not positive"),
        (lambda: nvlink(0), "nvlink: ranks=0 is not a positive number"),
        (lambda: dgx_h100(1.5), "dgx_h100: nodes=1.5 is not a positive number"),
        (lambda: fat_tree(0), "fat_tree: nodes=0"),
        (lambda: fat_tree(2, leaf=0), "fat_tree: leaf=0"),
        (lambda: fat_tree(2, oversubscription=0.5), "oversubscription=0.5 is not at"),
        (lambda: tpu_torus(), "tpu_torus: needs the size of at least one dimension"),
        (lambda: tpu_torus(4, 0), "tpu_torus: shape=0"),
        (lambda: tpu_torus(4, latency=-1.0), "tpu_torus: latency=-1.0"),
        (lambda: table(2, {(0, 2): (1.0, 1.0)}), r"table: link \(0, 2\) of 2 ranks"),
        (lambda: table(2, {(1, 1): (1.0, 1.0)}), r"table: link \(1, 1\) of 2 ranks"),
        (lambda: table(2, {(0, 1): (1.0, 0)}), "bandwidth=0 is not positive"),
        (
            lambda: table(4, {(0, 1): (1.0, 1.0), (2, 3): (1.0, 1.0)}),
            r"rank 0 cannot reach ranks \[2, 3\]: .* does not join all 4 ranks",
        ),
        (
            lambda: table(2, {(0, 1): (1.0, 1.0)}, both=False),
            r"rank 1 cannot reach ranks \[0\]",
        ),
        (
            lambda: VirtualCluster(9, nvlink(8)),
            r"nvlink\(8\) joins 8 ranks, the cluster has 9",
        ),
    ],
)
def test_what_cannot_be_built_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_route_over_unknown_links_is_named():
    odd = Topology("odd", 2, {"a": 1.0}, lambda source, target: Route(0.0, ("b",)))
    with pytest.raises(ValueError, match="odd: .*0 to 1 .*'b'"):
        odd.route(0, 1)
