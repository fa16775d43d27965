"""How long messages take: latency, then a fair share of every link they cross.

    rate of a message = what is left for it on its tightest link (max-min fairness):
    all rates rise together until a link is full; those that cross it stay there, the
    others rise on.

Rates change whenever a message begins or ends, for those that share links with it,
directly or over others. Messages from one rank to another follow one another. A
collective of torch is one flow over all edges of its pattern: it crosses a link as
often as its edges do.

Source of the model: Casanova et al., Versatile, scalable, and accurate simulation of
distributed applications and platforms (SimGrid), 2014; Bertsekas and Gallager, Data
Networks, 1992 (max-min fairness).
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol

from xtrain.cluster.costs import Pattern, patterns_of
from xtrain.cluster.moves import Part
from xtrain.cluster.recorder import LinkUse
from xtrain.cluster.scheduler import Scheduler
from xtrain.cluster.topology import Topology

Ended = Callable[[float], object]
SAME = 1e-12  # shares that differ by less of themselves are one


class Network(Protocol):
    """Tells when what was sent has arrived, at once or later by an event."""

    def send(
        self, source: int, target: int, nbytes: int, start: float, ended: Ended
    ) -> None:
        """A message that both ends are ready for at `start`."""

    def collective(
        self, parts: Sequence[Part], ranks: Sequence[int], start: float, ended: Ended
    ) -> None:
        """A collective that all ranks have come to at `start`."""

    def use(self) -> dict[str, LinkUse]:
        """What has crossed each link, for those that something has."""


class NoNetwork:
    """Messages take no time."""

    def send(
        self, source: int, target: int, nbytes: int, start: float, ended: Ended
    ) -> None:
        ended(start)

    def collective(
        self, parts: Sequence[Part], ranks: Sequence[int], start: float, ended: Ended
    ) -> None:
        ended(start)

    def use(self) -> dict[str, LinkUse]:
        return {}


class PrivateLinks:
    """Every pair has a link of its own: ends are known at once."""

    def __init__(self, latency: float, bandwidth: float):
        self.latency, self.bandwidth, self.beta = latency, bandwidth, 1.0 / bandwidth
        self._free: dict[tuple[int, int], float] = {}
        self._bytes: dict[tuple[int, int], float] = {}

    def send(
        self, source: int, target: int, nbytes: int, start: float, ended: Ended
    ) -> None:
        pair = source, target
        gone = max(start, self._free.get(pair, 0.0)) + nbytes * self.beta
        self._free[pair] = gone
        self._bytes[pair] = self._bytes.get(pair, 0.0) + nbytes
        ended(gone + self.latency)

    def collective(
        self, parts: Sequence[Part], ranks: Sequence[int], start: float, ended: Ended
    ) -> None:
        pattern = min(patterns_of(parts, ranks), key=self.seconds)
        for pair, nbytes in pattern.edges.items():
            self._bytes[pair] = self._bytes.get(pair, 0.0) + nbytes
        ended(start + self.seconds(pattern))

    def seconds(self, pattern: Pattern) -> float:
        """Of a collective: latencies in a row, and the bytes of its fullest edge."""
        most = max(pattern.edges.values(), default=0.0)
        return pattern.hops * self.latency + most * self.beta

    def use(self) -> dict[str, LinkUse]:
        return {
            f"{source} to {target}": LinkUse(self.bandwidth, sent, sent * self.beta)
            for (source, target), sent in sorted(self._bytes.items())
        }


class NetworkLink:
    """A link and the flows that cross it now."""

    __slots__ = ("bandwidth", "busy", "bytes", "flows", "name", "since")

    def __init__(self, name: str, bandwidth: float):
        self.name, self.bandwidth = name, bandwidth
        self.flows: dict[Flow, float] = {}
        self.bytes = 0.0  # that have crossed it, or will have
        self.busy = self.since = 0.0  # seconds with a flow, and since when there is one


class Flow:
    """Bytes under way over some links.

    Attributes:
        crossings: how often it crosses each link: its rate counts so often there.
        left: bytes, at the time `since`.
    """

    __slots__ = ("crossings", "ended", "left", "rate", "since", "version")

    def __init__(
        self, crossings: list[tuple[NetworkLink, float]], nbytes: float, ended: Ended
    ):
        self.crossings, self.left, self.ended = crossings, nbytes, ended
        self.rate = self.since = 0.0
        self.version = 0


class SharedLinks:
    """Messages and collectives on the links of a topology."""

    def __init__(self, scheduler: Scheduler, topology: Topology):
        self._scheduler, self._topology = scheduler, topology
        self.links = {n: NetworkLink(n, b) for n, b in topology.bandwidth.items()}
        self._queues: dict[tuple[int, int], deque] = {}
        self._changed: dict[NetworkLink, None] = {}  # in order, as a set is not
        self._settles_at = -1.0

    def send(
        self, source: int, target: int, nbytes: int, start: float, ended: Ended
    ) -> None:
        route = self._topology.route(source, target)
        crossings = [(self.links[name], 1.0) for name in route.links]
        queue = self._queues.setdefault((source, target), deque())

        def all_gone(time: float) -> None:
            queue.popleft()
            ended(time)
            if queue:
                at, flow = queue[0]
                self._scheduler.at(
                    max(at, time), lambda: self._begin(flow, max(at, time))
                )

        flow = Flow(crossings, float(nbytes), all_gone)
        begins = start + route.latency
        queue.append((begins, flow))
        if len(queue) == 1:
            self._scheduler.at(begins, lambda: self._begin(flow, begins))

    def collective(
        self, parts: Sequence[Part], ranks: Sequence[int], start: float, ended: Ended
    ) -> None:
        patterns = patterns_of(parts, ranks, self._topology.node)
        ways = [self._as_flow(pattern, ended) for pattern in patterns]
        latency, flow = min(ways, key=lambda way: way[0] + alone(way[1]))
        begins = start + latency
        self._scheduler.at(begins, lambda: self._begin(flow, begins))

    def _as_flow(self, pattern: Pattern, ended: Ended) -> tuple[float, Flow]:
        longest, around, unit = 0.0, 0.0, max(pattern.edges.values(), default=0.0)
        crossings: dict[NetworkLink, float] = {}
        for (source, target), nbytes in pattern.edges.items():
            route = self._topology.route(source, target)
            longest = max(longest, route.latency)
            around += route.latency * nbytes
            for name in route.links:
                link = self.links[name]
                if nbytes:
                    crossings[link] = crossings.get(link, 0.0) + nbytes / unit
        total = sum(pattern.edges.values())
        hop = around / total if pattern.around and total else longest
        return pattern.hops * hop, Flow(list(crossings.items()), unit, ended)

    def use(self) -> dict[str, LinkUse]:
        return {
            link.name: LinkUse(link.bandwidth, link.bytes, link.busy)
            for link in self.links.values()
            if link.bytes
        }

    # -- flows -------------------------------------------------------------------------

    def _begin(self, flow: Flow, time: float) -> None:
        if not flow.crossings or flow.left <= 0:
            flow.ended(time)
            return
        flow.since = time
        for link, times in flow.crossings:
            if not link.flows:
                link.since = time
            link.flows[flow] = times
            link.bytes += times * flow.left
        self._settle_later((link for link, _ in flow.crossings), time)

    def _end(self, flow: Flow, version: int, time: float) -> None:
        if flow.version != version:
            return  # its rate has changed since
        for link, _ in flow.crossings:
            del link.flows[flow]
            if not link.flows:
                link.busy += time - link.since
        flow.version += 1
        self._settle_later((link for link, _ in flow.crossings if link.flows), time)
        flow.ended(time)

    def _settle_later(self, links: Iterable[NetworkLink], time: float) -> None:
        """Share anew when all that happens at this time has happened."""
        self._changed.update(dict.fromkeys(links))
        if self._changed and self._settles_at != time:
            self._settles_at = time
            self._scheduler.at(time, lambda: self._settle(time))

    def _settle(self, time: float) -> None:
        self._settles_at = -1.0
        flows = connected(self._changed)
        self._changed.clear()
        for flow in flows:
            flow.left -= flow.rate * (time - flow.since)
            flow.since = time
        for flow, rate in fair_rates(flows).items():
            if rate != flow.rate or flow.version == 0:
                flow.rate = rate
                flow.version += 1
                end = time + max(0.0, flow.left) / rate
                self._scheduler.at(end, partial(self._end, flow, flow.version, end))


def connected(links: Iterable[NetworkLink]) -> list[Flow]:
    """The flows that share links with these, directly or over other flows."""
    found: dict[Flow, None] = {}
    seen, todo = set(links), list(links)
    while todo:
        for flow in todo.pop().flows:
            if flow not in found:
                found[flow] = None
                fresh = [link for link, _ in flow.crossings if link not in seen]
                seen.update(fresh)
                todo += fresh
    return list(found)


def fair_rates(flows: Sequence[Flow]) -> dict[Flow, float]:
    """The max-min fair rate of each flow, in bytes a second: progressive filling."""
    if len(flows) == 1:
        return {flows[0]: min(b.bandwidth / times for b, times in flows[0].crossings)}
    rates: dict[Flow, float] = {}
    left = {link: link.bandwidth for flow in flows for link, _ in flow.crossings}
    waiting, share = list(flows), 0.0
    while waiting:
        weight: dict[NetworkLink, float] = {}
        for flow in waiting:
            for link, times in flow.crossings:
                weight[link] = weight.get(link, 0.0) + times
        shares = {link: left[link] / weight[link] for link in weight}
        share = max(share, min(shares.values()))  # it only rises, but for rounding
        full = {link for link in shares if shares[link] <= share * (1 + SAME)}
        for flow in waiting:
            if any(link in full for link, _ in flow.crossings):
                rates[flow] = share
                for link, times in flow.crossings:
                    left[link] -= times * share
        waiting = [flow for flow in waiting if flow not in rates]
    return rates


def alone(flow: Flow) -> float:
    """Seconds of a flow that shares with no other."""
    most = max((times / link.bandwidth for link, times in flow.crossings), default=0.0)
    return flow.left * most


def network_of(topology: Topology | None, scheduler: Scheduler) -> Network:
    """What moves the messages of a cluster."""
    if topology is None:
        return NoNetwork()
    if topology.private is not None:
        return PrivateLinks(*topology.private)
    return SharedLinks(scheduler, topology)
