"""Who is joined to whom: named links, each with a latency and a bandwidth.

    dgx_h100(2)    gpu 0 --up--> NVSwitch --down--> gpu 1          inside a node
                   gpu 0 --out-> network  --in----> gpu 8          between nodes

A route is the links that a message crosses. Messages that cross one link at the same
time share its bandwidth; `network` says how. Latencies are in seconds, bandwidths in
bytes a second and one direction; links of the two directions are two links.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from xtrain.plan.hardware import Accelerator

NODE = 8  # GPUs of a DGX
NVLINK_LATENCY = 2e-6  # of a small message, launch included
NETWORK_LATENCY = 5e-6


@dataclass(frozen=True, slots=True)
class Route:
    """What a message from one rank to another crosses."""

    latency: float
    links: tuple[str, ...]


@dataclass(frozen=True)
class Topology:
    """Ranks and links.

    Args:
        name: for drawings and messages.
        size: how many ranks it joins; None for as many as there are.
        bandwidth: of each link by its name; of a `flat` one, of every pair.
        find_route: the route between two ranks.
        accelerator: whose compute its ranks have, for programs that count FLOPs.
        private: latency and bandwidth, where each pair has a link of its own.
        node: so many ranks, one after another, are a node with an adapter for each.
    """

    name: str
    size: int | None
    bandwidth: Mapping[str, float]
    find_route: Callable[[int, int], Route]
    accelerator: Accelerator | None = None
    private: tuple[float, float] | None = None
    node: int = 1

    def route(self, source: int, target: int) -> Route:
        """The links from one rank to another."""
        route = self.find_route(source, target)
        for link in route.links:
            if link not in self.bandwidth:
                raise ValueError(
                    f"{self.name}: the route from rank {source} to {target} has a "
                    f"link {link!r}, which has no bandwidth in the topology"
                )
        return route

    def check(self, size: int) -> None:
        """ValueError unless it joins `size` ranks."""
        if self.size is not None and size > self.size:
            raise ValueError(
                f"{self.name} joins {self.size} ranks, the cluster has {size}"
            )


def flat(latency: float, bandwidth: float) -> Topology:
    """Every pair of ranks has a link of its own: the alpha-beta model.

    Args:
        latency: alpha, in seconds.
        bandwidth: 1 / beta, in bytes a second.
    """
    _check_numbers("flat", latency, bandwidth)
    route = Route(latency, ())
    return Topology(
        f"flat({latency:g}, {bandwidth:g})", None, {}, lambda source, target: route,
        private=(latency, bandwidth),
    )  # fmt: skip


def nvlink(ranks: int = NODE, accelerator: str = "h100") -> Topology:
    """GPUs on one switch: each has its way up to it and its way down."""
    _check_count("nvlink", "ranks", ranks)
    device = Accelerator.preset(accelerator)
    bandwidth = {}
    for rank in range(ranks):
        bandwidth[f"gpu {rank} up"] = device.link.bandwidth
        bandwidth[f"gpu {rank} down"] = device.link.bandwidth
    return Topology(
        f"nvlink({ranks})", ranks, bandwidth,
        lambda source, target: Route(
            NVLINK_LATENCY, (f"gpu {source} up", f"gpu {target} down")
        ),
        device,
    )  # fmt: skip


def dgx_h100(nodes: int = 1) -> Topology:
    """Nodes of 8 H100 on NVSwitch; each GPU has an adapter of 400 Gbit/s.

    The network between nodes is taken as not blocking: adapters are its only limits.
    """
    return _nodes(f"dgx_h100({nodes})", nodes, lambda source, target: ())


def fat_tree(nodes: int, leaf: int = 4, oversubscription: float = 1.0) -> Topology:
    """DGX H100 nodes below leaf switches, which a spine joins.

    Args:
        leaf: nodes on a leaf switch.
        oversubscription: adapters' bandwidth below a leaf over that of its uplinks.
    """
    _check_count("fat_tree", "leaf", leaf)
    if not (oversubscription >= 1.0 and math.isfinite(oversubscription)):
        raise ValueError(
            f"fat_tree: oversubscription={oversubscription} is not at least 1"
        )
    network = Accelerator.preset("h100").network
    assert network is not None
    uplinks = {}
    for number in range(-(-nodes // leaf) if nodes > 0 else 0):
        for way in ("to spine", "from spine"):
            total = leaf * NODE * network.bandwidth / oversubscription
            uplinks[f"leaf {number} {way}"] = total

    def between(source: int, target: int) -> tuple[str, ...]:
        leaves = source // NODE // leaf, target // NODE // leaf
        if leaves[0] == leaves[1]:
            return ()
        return f"leaf {leaves[0]} to spine", f"leaf {leaves[1]} from spine"

    name = f"fat_tree({nodes}, leaf={leaf}, oversubscription={oversubscription:g})"
    return _nodes(name, nodes, between, uplinks)


def tpu_torus(*shape: int, latency: float = 1e-6) -> Topology:
    """Chips on a torus of the given shape; messages turn one dimension after the other.

    Each chip has a link to both neighbours of every dimension; a message takes the
    shorter way around.
    """
    for count in shape:
        _check_count("tpu_torus", "shape", count)
    if not shape:
        raise ValueError("tpu_torus: needs the size of at least one dimension")
    device = Accelerator.preset("tpu-v5p")
    _check_numbers("tpu_torus", latency, device.link.bandwidth)
    chips = list(product(*(range(count) for count in shape)))
    number = {place: rank for rank, place in enumerate(chips)}
    bandwidth = {}
    for rank in range(len(chips)):
        for dim, count in enumerate(shape):
            for sign in "+-" if count > 2 else "+" if count == 2 else "":
                bandwidth[f"chip {rank} {dim}{sign}"] = device.link.bandwidth

    def route(source: int, target: int) -> Route:
        place, links = list(chips[source]), []
        for dim, count in enumerate(shape):
            ahead = (chips[target][dim] - place[dim]) % count
            step = 1 if ahead <= count - ahead else -1
            for _ in range(min(ahead, count - ahead)):
                sign = "+" if step == 1 or count == 2 else "-"
                links.append(f"chip {number[tuple(place)]} {dim}{sign}")
                place[dim] = (place[dim] + step) % count
        return Route(latency * len(links), tuple(links))

    name = f"tpu_torus({', '.join(map(str, shape))})"
    return Topology(name, len(chips), bandwidth, lru_cache(None)(route), device)


def table(
    size: int, links: Mapping[tuple[int, int], tuple[float, float]], both: bool = True
) -> Topology:
    """Links between ranks, as {(0, 1): (latency, bandwidth)}; least latency routes.

    Args:
        both: a link of (0, 1) is also one of (1, 0).

    ValueError when a rank cannot reach another.
    """
    _check_count("table", "size", size)
    edges: dict[int, dict[int, tuple[float, float]]] = {r: {} for r in range(size)}
    for (source, target), (latency, bandwidth) in links.items():
        if not (0 <= source < size and 0 <= target < size) or source == target:
            raise ValueError(f"table: link {(source, target)} of {size} ranks")
        _check_numbers(f"table: link {(source, target)}", latency, bandwidth)
        edges[source][target] = latency, bandwidth
        if both:
            edges[target].setdefault(source, (latency, bandwidth))
    routes = [_least_latency(edges, source) for source in range(size)]
    for source, found in enumerate(routes):
        absent = [target for target in range(size) if target not in found]
        if absent:
            raise ValueError(
                f"table: rank {source} cannot reach ranks {absent[:8]}: the topology "
                f"does not join all {size} ranks"
            )
    bandwidths = {
        f"{source} to {target}": values[1]
        for source, ends in edges.items()
        for target, values in ends.items()
    }
    return Topology(f"table of {size}", size, bandwidths, lambda s, t: routes[s][t])


def _least_latency(
    edges: Mapping[int, Mapping[int, tuple[float, float]]], source: int
) -> dict[int, Route]:
    found: dict[int, Route] = {}
    open_ = {source: Route(0.0, ())}
    while open_:
        here = min(open_, key=lambda rank: (open_[rank].latency, rank))
        found[here] = route = open_.pop(here)
        for there, (latency, _) in edges[here].items():
            longer = Route(
                route.latency + latency, (*route.links, f"{here} to {there}")
            )
            if there not in found and (
                there not in open_ or longer.latency < open_[there].latency
            ):
                open_[there] = longer
    return found


def _nodes(
    name: str,
    nodes: int,
    between: Callable[[int, int], Sequence[str]],
    more: Mapping[str, float] | None = None,
) -> Topology:
    _check_count(name.partition("(")[0], "nodes", nodes)
    device = Accelerator.preset("h100")
    assert device.network is not None
    bandwidth = dict(more or {})
    for rank in range(NODE * nodes):
        for way in ("up", "down"):
            bandwidth[f"gpu {rank} {way}"] = device.link.bandwidth
        for way in ("out", "in"):
            bandwidth[f"gpu {rank} {way}"] = device.network.bandwidth

    def route(source: int, target: int) -> Route:
        if source // NODE == target // NODE:
            links: tuple[str, ...] = (f"gpu {source} up", f"gpu {target} down")
            return Route(NVLINK_LATENCY, links)
        middle = tuple(between(source, target))
        return Route(
            NETWORK_LATENCY, (f"gpu {source} out", *middle, f"gpu {target} in")
        )

    return Topology(name, NODE * nodes, bandwidth, route, device, node=NODE)


def _check_count(name: str, what: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {what}={value} is not a positive number of them")


def _check_numbers(name: str, latency: float, bandwidth: float) -> None:
    if not (latency >= 0 and math.isfinite(latency)):
        raise ValueError(f"{name}: latency={latency} is not a number of seconds")
    if not bandwidth > 0:
        raise ValueError(f"{name}: bandwidth={bandwidth} is not positive")
