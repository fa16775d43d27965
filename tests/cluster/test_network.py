"""Fair shares of links, by their definition, and flows over time, by hand."""

import itertools
from heapq import heappop, heappush
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from xtrain.cluster import VirtualCluster, dgx_h100, fat_tree, now
from xtrain.cluster.costs import _parent, trees
from xtrain.cluster.network import Flow, NetworkLink, SharedLinks, fair_rates
from xtrain.cluster.topology import Route, Topology

NETWORK = "xtrain.cluster.network"
LINK = 100.0  # bytes a second


@st.composite
def flows_on_links(draw):
    """Flows that cross some links, each some times."""
    count = draw(st.integers(1, 6))
    bandwidths = st.floats(1e-3, 1e12)
    links = [NetworkLink(f"link {n}", draw(bandwidths)) for n in range(count)]
    times = st.one_of(st.just(1.0), st.floats(1e-9, 1e3))
    flows = []
    for _ in range(draw(st.integers(1, 12))):
        crossed = draw(st.lists(st.sampled_from(links), min_size=1, unique=True))
        flow = Flow([(link, draw(times)) for link in crossed], 1.0, lambda end: None)
        for link, weight in flow.crossings:
            link.flows[flow] = weight
        flows.append(flow)
    return flows


@pytest.mark.verifies(f"{NETWORK}:fair_rates")
@settings(deadline=None)
@given(flows_on_links())
def test_each_flow_has_a_full_link_on_which_no_other_is_faster(flows):
    """Bertsekas and Gallager's definition of max-min fairness by bottlenecks."""
    rates = fair_rates(flows)
    assert set(rates) == set(flows) and all(rate > 0 for rate in rates.values())
    links = {link for flow in flows for link, _ in flow.crossings}
    full = set()
    for link in links:
        used = sum(rates[flow] * times for flow, times in link.flows.items())
        assert used <= link.bandwidth * (1 + 1e-9)
        if used >= link.bandwidth * (1 - 1e-9):
            full.add(link)
    for flow in flows:
        assert any(
            link in full
            and rates[flow] >= max(rates[each] for each in link.flows) * (1 - 1e-9)
            for link, _ in flow.crossings
        )


def joined_by(routes: dict, latency: float = 0.0, **bandwidth: float) -> Topology:
    """Ranks whose messages cross the named links."""
    return Topology(
        "by hand", None, bandwidth,
        lambda source, target: Route(latency, routes[source, target]),
    )  # fmt: skip


class Events:
    """As much of a scheduler as the network needs."""

    def __init__(self) -> None:
        self._heap: list[Any] = []
        self._count = itertools.count()
        self.time = 0.0

    def at(self, time, action) -> None:
        assert time >= self.time, "in the past"
        heappush(self._heap, (time, next(self._count), action))

    def run(self) -> None:
        while self._heap:
            self.time, _, action = heappop(self._heap)
            action()


def arrivals(topology: Topology, messages) -> list[float]:
    """When each of (source, target, bytes, start) has arrived."""
    events, ends = Events(), {}
    links = SharedLinks(events, topology)

    def send(number, source, target, nbytes, start):
        links.send(
            source, target, nbytes, start, lambda end: ends.update({number: end})
        )

    for number, message in enumerate(messages):
        events.at(message[3], lambda n=number, m=message: send(n, *m))
    events.run()
    assert not any(link.flows for link in links.links.values())
    return [ends[number] for number in range(len(messages))]


LINE = {  # 0 -> 1 over a, 2 -> 3 over b, 4 -> 5 over both
    (0, 1): ("a",), (2, 3): ("b",), (4, 5): ("a", "b"),
}  # fmt: skip


@pytest.mark.verifies(f"{NETWORK}:SharedLinks")
def test_a_link_is_shared_while_two_messages_are_on_it():
    """300 bytes from 0 s; 100 bytes from 1 s: both at 50 bytes/s until the second has
    gone at 3 s; the first then has 100 left, at 100 bytes/s.
    """
    topology = joined_by({(0, 1): ("a",), (2, 1): ("a",)}, a=LINK)
    assert arrivals(topology, [(0, 1, 300, 0.0), (2, 1, 100, 1.0)]) == [4.0, 3.0]


def test_latency_comes_first_and_takes_no_bandwidth():
    topology = joined_by({(0, 1): ("a",), (2, 1): ("a",)}, latency=0.5, a=LINK)
    assert arrivals(topology, [(0, 1, 100, 0.0), (2, 1, 100, 1.0)]) == [1.5, 2.5]


def test_what_one_flow_leaves_another_takes():
    """a is shared by two; the long one leaves 90 of b's 140 to the third.

    Each of the first two: 50 bytes/s. When the flow of b alone has gone nothing else
    changes; when the first on a has gone the long one takes all of a.
    """
    topology = joined_by(LINE, a=LINK, b=140.0)
    ends = arrivals(topology, [(0, 1, 100, 0.0), (2, 3, 90, 0.0), (4, 5, 200, 0.0)])
    assert ends == [2.0, 1.0, 3.0]


def test_messages_from_one_rank_to_another_follow_one_another():
    topology = joined_by({(0, 1): ("a",)}, a=LINK)
    ends = arrivals(topology, [(0, 1, 100, 0.0), (0, 1, 50, 0.0), (0, 1, 0, 0.0)])
    assert ends == [1.0, 1.5, 1.5]


def test_messages_without_bytes_or_links_take_the_latency():
    topology = joined_by({(0, 1): ("a",), (2, 3): ()}, latency=0.25, a=LINK)
    ends = arrivals(topology, [(0, 1, 0, 0.0), (2, 3, 1000, 1.0)])
    assert ends == [0.25, 1.25]


@pytest.mark.parametrize("count", [3, 7, 1000])
def test_flows_that_end_together_do_so_in_spite_of_rounding(count):
    """Each is a third, a seventh, ... of the link: not a whole number of bytes/s."""
    topology = joined_by({(n, count): ("a",) for n in range(count)}, a=LINK)
    ends = arrivals(topology, [(n, count, 100, 0.1) for n in range(count)])
    assert ends == pytest.approx([0.1 + count] * count, rel=1e-12)


def test_time_does_not_drift_over_many_changes():
    """10,000 short messages come and go beside a long one, which has what they leave:
    all bytes at the full bandwidth in the end.
    """
    topology = joined_by({(0, 1): ("a",), (2, 1): ("a",)}, a=LINK)
    short = [(2, 1, 1, 0.03 * number) for number in range(10_000)]
    ends = arrivals(topology, [(0, 1, 30_000, 0.0), *short])
    assert ends[0] == pytest.approx((30_000 + 10_000) / LINK, rel=1e-11)


@settings(deadline=None, max_examples=50)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 15), st.integers(0, 15), st.integers(0, 10**6),
            st.floats(0, 1e-4),
        ).filter(lambda message: message[0] != message[1]),
        max_size=30,
    )
)  # fmt: skip
def test_every_message_arrives_and_each_byte_is_counted(messages):
    topology = fat_tree(2, leaf=1, oversubscription=4)
    ends = arrivals(topology, messages)
    for (source, target, nbytes, start), end in zip(messages, ends, strict=True):
        route = topology.route(source, target)
        alone = nbytes / min(topology.bandwidth[link] for link in route.links)
        assert end >= start + route.latency + alone * (1 - 1e-9)


def test_a_link_counts_bytes_and_busy_seconds():
    events = Events()
    links = SharedLinks(events, joined_by({(0, 1): ("a",)}, a=LINK, b=LINK))
    for start in (0.0, 5.0):
        links.send(0, 1, 100, start, lambda end: None)
    events.run()
    assert set(links.use()) == {"a"}
    assert (links.use()["a"].bytes, links.use()["a"].busy) == (200.0, 2.0)


def empty_collectives(rank, size):
    """No bytes on any edge: latencies alone."""
    dist.all_reduce(torch.empty(0))
    reduced = now()
    dist.all_to_all(
        list(torch.empty(size, 0).unbind()), list(torch.empty(size, 0).unbind())
    )
    exchanged = now()
    dist.broadcast(torch.empty(0), 0)
    return reduced, exchanged, now()


def test_collectives_without_bytes():
    """2 log2(16) latencies of a tree; all_to_all has no message; a chain of 15."""
    found = VirtualCluster(16, dgx_h100(2)).run(empty_collectives)
    right = 8 * 5e-6, 8 * 5e-6, (8 + 15) * 5e-6
    assert found == [pytest.approx(right)] * 16


@pytest.mark.verifies("xtrain.cluster.costs:trees")
@pytest.mark.parametrize("size", [*range(2, 34), 64, 100, 1024])
def test_two_trees_carry_half_each_within_their_depth(size):
    """No inner rank of one is an inner rank of the other: none sends, or takes, more
    than its bytes twice. The way to the root is as long as the latencies paid for.
    """
    pattern = trees(range(size), 2.0)
    up_and_down = sum(pattern.edges.values())
    assert up_and_down == 2 * 2 * (size - 1)  # 2 trees, 2 ways, half of 2 bytes each
    for rank in range(size):
        for end in (0, 1):
            load = sum(n for edge, n in pattern.edges.items() if edge[end] == rank)
            assert load <= 4.0
    deepest = 0
    for place in range(size):
        depth = 0
        while place:
            place, depth = _parent(place, size), depth + 1
        deepest = max(deepest, depth)
    assert pattern.hops == 2 * deepest
