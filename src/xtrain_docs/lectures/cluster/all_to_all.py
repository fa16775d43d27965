"""The page on congestion: all-to-alls on a switch, on nodes, on a tree of switches."""

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import torch

from xtrain.cluster import RunRecord
from xtrain.cluster.draw import document
from xtrain.cluster.heat import heat_svg
from xtrain.cluster.recorder import LinkUse
from xtrain.cluster.topology import NETWORK_LATENCY, NODE, NVLINK_LATENCY
from xtrain.plan import copy_bytes
from xtrain.plan.hardware import Accelerator

from ... import runs
from ...amounts import percent
from ...amounts import seconds as as_seconds
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .all_to_all_runs import (
    HIDDEN,
    PICTURED,
    PIECE,
    RANKS,
    TOKENS,
    TOP_K,
    dispatched,
    exchanged,
)

GPU = Accelerator.preset("h100")
NVLINK, ADAPTER = GPU.link.bandwidth, 50e9
LEAF = 2  # nodes on a leaf switch
COPY = copy_bytes(HIDDEN)
ORDERS = "rank 0 first", "next rank first", "all at once"
WIDTH, LEFT, ROW = 400, 62, 12


# -- three orders of the same messages -------------------------------------------------


def run_of(way: str, topology: str, ranks: int) -> dict[str, Any]:
    (found,) = runs.remembered(exchanged, 1, way, topology, ranks)
    return found


@value
def exchange_seconds(way: str, topology: str, ranks: int) -> float:
    """Virtual seconds of an all-to-all of pieces of 256 KiB."""
    return run_of(way, topology, ranks)["seconds"]


@value
def exchange_formula(way: str, ranks: int) -> float:
    """The closed form on one switch."""
    others, piece = ranks - 1, PIECE / NVLINK
    return {
        "rank 0 first": others * NVLINK_LATENCY + ranks * others / 2 * piece,
        "next rank first": others * (NVLINK_LATENCY + piece),
        "all at once": NVLINK_LATENCY + others * piece,
    }[way]


@TABLES
def orders_of_all_to_all() -> Table:
    """Three orders on one switch, beside their closed forms."""
    rows = []
    for ranks in (8, 16, 32):
        for way in ORDERS:
            took = exchange_seconds(way, "nvlink", ranks)
            formula = exchange_formula(way, ranks)
            rows.append(
                [ranks, way, as_seconds(took, 4), as_seconds(formula, 4)]
            )  # fmt: skip
    return Table(["ranks", "order", "run", "closed form"], rows, "rlrr")


@FIGURES
def arriving_messages() -> str:
    """Three orders at one scale of time: how many messages each rank receives."""
    found = {way: run_of(way, "nvlink", PICTURED) for way in ORDERS}
    scale = (WIDTH - LEFT - 8) / max(run["seconds"] for run in found.values())
    parts, top = [], 4.0
    for way, run in found.items():
        words = f"{way}: {as_seconds(run['seconds'])}"
        parts.append(f'<text class="l" x="{LEFT}" y="{top + 10}">{words}</text>')
        for rank in range(PICTURED):
            y = top + 16 + ROW * rank
            parts.append(f'<text class="t" x="0" y="{y + 9}">to rank {rank}</text>')
            for begin, end, many in under_way(run["messages"], rank):
                parts.append(
                    f'<rect class="h" x="{LEFT + begin * scale:.2f}" y="{y:.0f}" '
                    f'width="{(end - begin) * scale:.2f}" height="{ROW - 2}" '
                    f'fill-opacity="{many / (PICTURED - 1):.2f}">'
                    f"<title>{many} messages to rank {rank}</title></rect>"
                )
        top += 16 + ROW * PICTURED + 14
    title = "Messages that arrive at each rank in an all-to-all, for three orders"
    return document(WIDTH, top - 8, parts, title)


def under_way(
    messages: Iterable[tuple[int, int, float, float]], target: int
) -> Iterator[tuple[float, float, int]]:
    """The pieces of time in which as many messages come to a rank: begin, end, many."""
    coming = [(begin, end) for _, to, begin, end in messages if to == target]
    for begin, end in pairwise(sorted({time for both in coming for time in both})):
        many = sum(b <= begin and e >= end for b, e in coming)
        if many:
            yield begin, end, many


# -- tokens to their experts -----------------------------------------------------------


def dispatch_of(over: float, hot: float, size: int, stride: int) -> dict[str, Any]:
    """A dispatch on nodes below leaf switches with an oversubscribed spine."""
    topology = f"fat_tree(leaf={LEAF}, oversubscription={over:g})"
    (found,) = runs.remembered(dispatched, 1, topology, hot, size, stride)
    return found


@value
def dispatch_seconds(
    over: float = 1.0, hot: float = 1.0, size: int = RANKS, stride: int = 1
) -> float:
    """Virtual seconds of a dispatch of 4,096 tokens a rank."""
    return dispatch_of(over, hot, size, stride)["seconds"]


@value
def dispatch_formula(over: float = 1.0, size: int = RANKS, stride: int = 1) -> float:
    """The closed form for uniform routing: the slower of adapters and uplinks."""
    bytes_all = TOKENS * TOP_K * COPY
    adapter = bytes_all * far(size, stride, NODE) / ADAPTER
    uplink = bytes_all * far(size, stride, NODE * LEAF) * over / ADAPTER
    latency = NETWORK_LATENCY
    return latency + max(adapter, uplink)


def far(size: int, stride: int, block: int) -> float:
    """The share of an expert group that is not in a rank's own block of ranks."""
    return 1 - max(1, min(size, block // stride)) / size


@value
def fullest_link(over: float, hot: float, size: int = RANKS, stride: int = 1) -> float:
    """Seconds that the fullest link needs for the bytes of this very routing."""
    found = dispatch_of(over, hot, size, stride)
    return max(sent / bandwidth for bandwidth, sent, _ in found["links"].values())


@value
def received_over_mean(hot: float) -> float:
    """Copies for the rank that gets most, over the mean of all ranks."""
    sent = torch.tensor(dispatch_of(1.0, hot, RANKS, 1)["sent"])
    received = sent.sum(0).double()
    return float(received.max() / received.mean())


@TABLES
def dispatch_below_a_spine() -> Table:
    """Oversubscription against placement of the expert groups."""
    rows = []
    for size, stride, words, ratios in (
        (RANKS, 1, "64 ranks, on all nodes", (1.0, 2.0, 4.0)),
        (16, 4, "16 ranks, two of each node", (1.0, 4.0)),
        (16, 1, "16 ranks, on one leaf", (1.0, 4.0)),
    ):
        for over in ratios:
            took = dispatch_seconds(over, 1.0, size, stride)
            formula = dispatch_formula(over, size, stride)
            rows.append(
                [words, f"{over:g} : 1", as_seconds(took, 4), as_seconds(formula, 4),
                 percent(took / formula - 1, 1)]
            )  # fmt: skip
    header = ["expert group", "oversubscription", "run", "closed form", "difference"]
    return Table(header, rows, "llrrr")


@FIGURES
def dispatch_links(over: float = 1.0, hot: float = 1.0) -> str:
    """A cell for each link of the 8 nodes and their switches."""
    found = dispatch_of(over, hot, RANKS, 1)
    words = f"Links during a dispatch, oversubscription {over:g} : 1"
    links = {name: LinkUse(*use) for name, use in found["links"].items()}
    return heat_svg(RunRecord([found["seconds"]], [[]], [], links), words)
