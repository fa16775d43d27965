"""Collectives over nodes use every adapter, and follow one another in their group."""

import pytest
import torch
import torch.distributed as dist

from xtrain.cluster import VirtualCluster, dgx_h100, fat_tree, now, nvlink
from xtrain.cluster.costs import channels

NVLINK, ADAPTER = 450e9, 50e9
INSIDE, BETWEEN = 2e-6, 5e-6
MEGABYTE = 2**20


def near(seconds: float) -> object:
    return pytest.approx(seconds, rel=1e-9)


def gathered(rank: int, size: int, calls: int = 1) -> list[float]:
    """All-gathers of 16 MB a rank, started at once: when each has ended."""
    mine = torch.empty(4 * MEGABYTE, device="meta")
    whole = torch.empty(size * 4 * MEGABYTE, device="meta")
    works = [
        dist.all_gather_into_tensor(whole, mine, async_op=True) for _ in range(calls)
    ]
    return [(work.wait(), now())[1] for work in works]


def summed() -> float:
    dist.all_reduce(torch.empty(64 * MEGABYTE, device="meta"))
    return now()


def latency(nodes: int) -> float:
    """Of one hop, on average: one edge in eight of a ring leaves its node."""
    return (7 * INSIDE + BETWEEN) / 8 if nodes > 1 else INSIDE


@pytest.mark.verifies("xtrain.cluster.costs:channels", "xtrain.cluster.costs:spread")
@pytest.mark.parametrize("make", [dgx_h100, fat_tree])
@pytest.mark.parametrize("nodes", [2, 3, 8])
def test_a_ring_over_nodes_has_all_their_adapters(nodes, make) -> None:
    size = 8 * nodes
    seconds = (size - 1) * 16 * MEGABYTE / (8 * ADAPTER)
    found = VirtualCluster(size, make(nodes)).run(gathered)
    assert found == [[near((size - 1) * latency(nodes) + seconds)]] * size
    whole = 256 * MEGABYTE * 2 * (size - 1) / size / (8 * ADAPTER)
    assert (
        VirtualCluster(size, make(nodes)).run(summed)
        == [near(2 * (size - 1) * latency(nodes) + whole)] * size
    )


def handed_on(root: int) -> list[float]:
    """Out from a root and back to it."""
    tensor = torch.empty(64 * MEGABYTE, device="meta")
    dist.broadcast(tensor, root)
    between = now()
    dist.reduce(tensor, root)
    return [between, now() - between]


@pytest.mark.verifies(
    "xtrain.cluster.costs:chain", "xtrain.cluster.costs:starting_with"
)
@pytest.mark.parametrize("root", [0, 7, 11])
@pytest.mark.parametrize("nodes", [2, 3])
def test_a_chain_over_nodes_has_all_their_adapters(nodes, root) -> None:
    """Eight chains over M nodes have 8 (8M - 1) edges, of which 8M - 1 leave a node."""
    size = 8 * nodes
    seconds = 256 * MEGABYTE / (8 * ADAPTER)
    expected = near((size - 1) * latency(nodes) + seconds)
    found = VirtualCluster(size, dgx_h100(nodes)).run(handed_on, root)
    assert found == [[expected, expected]] * size


@pytest.mark.verifies("xtrain.cluster.costs:patterns_of")
def test_every_adapter_carries_as_much() -> None:
    cluster = VirtualCluster(24, dgx_h100(3), record=True)
    cluster.run(gathered)
    assert cluster.record is not None
    used = {n: use.bytes for n, use in cluster.record.links.items() if "out" in n}
    assert used.keys() == {f"gpu {rank} out" for rank in range(24)}
    assert list(used.values()) == [near(23 * 16 * MEGABYTE / 8)] * 24


@pytest.mark.verifies("xtrain.cluster.costs:channels")
def test_orders_of_whole_nodes_and_of_others() -> None:
    assert channels(range(4), 2) == [[0, 1, 2, 3], [1, 0, 3, 2]]
    for ranks in ([0, 8, 16], [0, 1, 8], range(8)):
        assert channels(ranks, 8) == [ranks]


@pytest.mark.verifies("xtrain.cluster.collectives:CollectiveCalls")
@pytest.mark.parametrize("nodes", [1, 2])
def test_calls_of_a_group_follow_one_another(nodes) -> None:
    size = 8 * nodes
    topology = nvlink(8) if nodes == 1 else dgx_h100(2)
    once = VirtualCluster(size, topology).run(gathered)[0][0]
    for seed in (None, 1, 2):
        found = VirtualCluster(size, topology, seed=seed).run(gathered, 3)
        assert found[0] == [near(once), near(2 * once), near(3 * once)]
