"""The page on congestion: all-to-alls on a switch, on nodes, on a tree of switches."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from xtrain.cluster import Record, VirtualCluster, now
from xtrain.cluster.draw import timeline_svg
from xtrain.cluster.heat import heat_svg
from xtrain.cluster.recorder import LinkUse, Span, Transfer
from xtrain.cluster.topology import NETWORK_LATENCY, NODE, NVLINK_LATENCY
from xtrain.cluster.topology_text import topology_of
from xtrain.comm import all_to_all_single
from xtrain.expert_parallel import Routing, dispatch, plan_dispatch
from xtrain.plan import all_to_all_bytes, copy_bytes
from xtrain.plan.hardware import Accelerator

from ... import runs
from ...amounts import percent
from ...amounts import seconds as as_seconds
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value

GPU = Accelerator.preset("h100")
NVLINK, ADAPTER = GPU.link.bandwidth, 50e9
PIECE = 2**18  # bytes from each rank to each other
EXPERTS, TOP_K, HIDDEN = 256, 8, 7168  # of DeepSeek-V3
RANKS, TOKENS, LEAF = 64, 4096, 2  # tokens of a rank, nodes on a leaf switch
COPY = copy_bytes(HIDDEN)


def kept(cluster: VirtualCluster, seconds: float, whole: bool = False) -> dict:
    """What a figure needs of a run, as JSON."""
    record = cluster.record
    assert record is not None
    found: dict[str, Any] = {
        "seconds": seconds, "links": {n: list(u) for n, u in record.links.items()}
    }  # fmt: skip
    if whole:
        found["clocks"] = list(record.seconds)
        found["waits"] = [list(map(list, one)) for one in record.waits]
        found["transfers"] = list(map(list, record.transfers))
    return found


def record_of(found: dict) -> Record:
    return Record(
        found.get("clocks", [found["seconds"]]),
        [[Span(*span) for span in one] for one in found.get("waits", [[]])],
        [Transfer(*one) for one in found.get("transfers", [])],
        {name: LinkUse(*use) for name, use in found["links"].items()},
    )


# -- three orders of the same messages -------------------------------------------------


def same_order(taken_NM: Tensor, given_NM: Tensor) -> None:
    """All ranks send to rank 0 first, then to rank 1, and so on."""
    one_by_one(taken_NM, given_NM, range(dist.get_world_size()))


def next_rank_first(taken_NM: Tensor, given_NM: Tensor) -> None:
    """Each rank begins with the one after it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    one_by_one(taken_NM, given_NM, [(rank + step) % size for step in range(size)])


def one_by_one(taken_NM: Tensor, given_NM: Tensor, order: Iterable[int]) -> None:
    peers = [peer for peer in order if peer != dist.get_rank()]
    receives = [dist.irecv(taken_NM[peer], peer) for peer in peers]
    for peer in peers:
        dist.send(given_NM[peer], peer)
    for receive in receives:
        receive.wait()


WAYS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "same order": same_order, "next rank first": next_rank_first,
    "all at once": all_to_all_single, "torch": dist.all_to_all_single,
}  # fmt: skip


def exchange(way: str, nbytes: int) -> float:
    """On each rank: the virtual seconds of an all-to-all with such pieces."""
    given_NM = torch.empty(dist.get_world_size(), nbytes // 4, device="meta")
    WAYS[way](torch.empty_like(given_NM), given_NM)
    return now()


def exchanged(way: str, topology: str, ranks: int, whole: bool) -> dict:
    cluster = VirtualCluster(
        ranks, topology_of(topology, ranks), checks=False, record=True
    )
    seconds = max(cluster.run(exchange, way, PIECE))
    return kept(cluster, seconds, whole)


def run_of(way: str, topology: str, ranks: int, whole: bool = False) -> dict:
    (found,) = runs.remembered(exchanged, 1, way, topology, ranks, whole)
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
        "same order": others * NVLINK_LATENCY + ranks * others / 2 * piece,
        "next rank first": others * (NVLINK_LATENCY + piece),
        "all at once": NVLINK_LATENCY + others * piece,
    }[way]


@TABLES
def orders_of_all_to_all() -> Table:
    """Three orders on one switch, beside their closed forms."""
    rows = []
    for ranks in (8, 16, 32):
        for way in ("same order", "next rank first", "all at once"):
            took = exchange_seconds(way, "nvlink", ranks)
            formula = exchange_formula(way, ranks)
            rows.append(
                [ranks, way, as_seconds(took, 4), as_seconds(formula, 4)]
            )  # fmt: skip
    return Table(["ranks", "order", "run", "closed form"], rows, "rlrr")


@FIGURES
def all_to_all_timeline(way: str = "same order") -> str:
    """What 8 ranks of a switch do."""
    way = way.replace("_", " ")
    record = record_of(run_of(way, "nvlink", 8, whole=True))
    return timeline_svg(record, f"All-to-all, {way}")


# -- tokens to their experts -----------------------------------------------------------


def random_experts(seed: int, hot: float) -> Tensor:
    """The experts of a rank's tokens; expert 0 has `hot` times the others' chance."""
    random = torch.Generator().manual_seed(seed)
    chances_E = torch.ones(EXPERTS)
    chances_E[0] = hot
    return torch.multinomial(
        chances_E.expand(TOKENS, -1), TOP_K, generator=random
    )  # no expert twice


def one_dispatch(hot: float, size: int, stride: int) -> tuple[float, list[int]]:
    """On each rank: the virtual seconds of a dispatch, and its copies to each rank."""
    experts_Tk = random_experts(dist.get_rank(), hot)
    ones_Tk = torch.ones(experts_Tk.shape)
    scores_TE = torch.zeros(1, 1).expand(TOKENS, EXPERTS)
    routing = Routing(experts_Tk, ones_Tk, scores_TE, scores_TE, ones_Tk > 0)
    plan = plan_dispatch(routing, group_of(size, stride))
    x_TH = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device="meta")
    dist.barrier()
    begun = now()
    dispatch(x_TH, plan)
    return now() - begun, plan.sent


def group_of(size: int, stride: int) -> ProcessGroup:
    """This rank's expert group: `size` ranks that are `stride` apart."""
    ranks = torch.arange(dist.get_world_size()).view(-1, size, stride)
    rows = ranks.transpose(1, 2).reshape(-1, size).tolist()
    made = [dist.new_group(row) for row in rows]  # every rank calls every one
    return next(
        group for group, row in zip(made, rows, strict=True) if dist.get_rank() in row
    )


def dispatched(topology: str, hot: float, size: int, stride: int) -> dict:
    cluster = VirtualCluster(
        RANKS, topology_of(topology, RANKS), checks=False, record=True
    )
    seconds, sent = zip(*cluster.run(one_dispatch, hot, size, stride), strict=True)
    return kept(cluster, max(seconds)) | {"sent": sent}


def dispatch_of(over: float, hot: float, size: int, stride: int) -> dict:
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
    return heat_svg(record_of(found), words)
