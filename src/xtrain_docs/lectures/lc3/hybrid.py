"""The page on hybrid sharding: steps of both kinds on a virtual cluster."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from xtrain.cluster import VirtualCluster, now
from xtrain.cluster.recorder import RunTransfer
from xtrain.cluster.topology import NODE
from xtrain.cluster.topology_text import topology_of
from xtrain.plan import Layout, ModelShape, traffic_per_step
from xtrain.plan.transfer import Transfer
from xtrain.zero import FullyShardedDataParallel
from xtrain.zero.hybrid import hybrid_groups

from ... import runs
from ...amounts import bytes_
from ...amounts import seconds as as_seconds
from ...figures import REGISTRY as FIGURES
from ...svg import TimeAxis, document, line, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .common import WIDTH

RANKS, LAYERS, MODEL_WIDTH, TOKENS = 32, 4, 8192, 2048
PARAMETERS = LAYERS * 8 * MODEL_WIDTH**2
NETWORKS = {
    "an adapter for each GPU": "dgx_h100",
    "a quarter of that": "fat_tree(leaf=1,oversubscription=4.0)",
}
"""Topologies by what joins the nodes."""
SLOW = "a quarter of that"
LANES = {"computes": 2, "in the node": 0, "to other nodes": 1}
LEFT, ROW = 92.0, 17
ALL_REDUCE = "ring_all_reduce"


class FeedForward(nn.Sequential):
    """The feed-forward part of a layer: one unit."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(MODEL_WIDTH, 4 * MODEL_WIDTH, bias=False), nn.ReLU(),
            nn.Linear(4 * MODEL_WIDTH, MODEL_WIDTH, bias=False),
        )  # fmt: skip


def two_steps(hybrid: bool, micro_batches: int) -> tuple[float, float]:
    """On each rank: when its second step begins, and when it ends."""
    with torch.device("meta"):
        blocks = [FeedForward().to(torch.bfloat16) for _ in range(LAYERS)]
        x_TD = torch.empty(TOKENS, MODEL_WIDTH, dtype=torch.bfloat16)
    inner, outer = hybrid_groups(NODE) if hybrid else (None, None)
    model = FullyShardedDataParallel(
        nn.Sequential(*blocks), inner, blocks=[FeedForward], device="meta",
        replicate_group=outer,
    )  # fmt: skip
    begun = 0.0
    for _ in range(2):  # in the first forward no unit knows the next one
        dist.barrier()
        begun = now()
        with model.no_all_reduce():
            for _ in range(micro_batches - 1):
                model(x_TD).sum().backward()
        model(x_TD).sum().backward()
    return begun, now()


def step_on_nodes(hybrid: bool, network: str, micro_batches: int) -> dict[str, Any]:
    """A step as rank 0 sees it, and what its node sends to others."""
    cluster = VirtualCluster(
        RANKS, topology_of(NETWORKS[network], RANKS), accelerator="h100", record=True,
        checks=False,
    )  # fmt: skip
    begun, end = cluster.run(two_steps, hybrid, micro_batches)[0]
    record = cluster.record
    assert record is not None
    bars = [
        ["computes", span.start - begun, span.end - begun]
        for span in record.spans(0)
        if span.kind == "compute" and span.start >= begun
    ]
    for one in record.transfers:
        if 0 in one.ranks and one.start >= begun and len(one.ranks) > 1 and one.nbytes:
            bars.append([lane_of(one), one.start - begun, one.end - begun])
    out = sum(record.links[f"gpu {rank} out"].bytes for rank in range(NODE))
    return {"seconds": end - begun, "sent": out / 2, "bars": bars}


def lane_of(transfer: RunTransfer) -> str:
    """Whether it leaves the node."""
    nodes = {rank // NODE for rank in transfer.ranks}
    return "to other nodes" if len(nodes) > 1 else "in the node"


def run_of(hybrid: bool, network: str, micro_batches: int) -> dict[str, Any]:
    """That of a build before, or a new one."""
    return runs.remembered(step_on_nodes, 1, hybrid, network, micro_batches)[0]


@value
def hybrid_seconds(hybrid: bool, micro_batches: int, network: str = SLOW) -> float:
    """Virtual seconds of a step."""
    return run_of(hybrid, network, micro_batches)["seconds"]


@value
def hybrid_sent(hybrid: bool, micro_batches: int) -> float:
    """Bytes that a node sends to others in a step, by the formula.

    Weights have 2 bytes, reduced gradients 4. A ring over all ranks leaves each node
    once.
    """
    if not hybrid:
        return micro_batches * (2 + 2 + 4) * PARAMETERS * (RANKS - 1) / RANKS
    nodes = RANKS // NODE
    return 2 * 4 * PARAMETERS * (nodes - 1) / nodes


@value
def hybrid_inside(layout: Layout, sequence: int = 8192) -> float:
    """Bytes that a rank of Llama 3 8B gathers and scatters in a step, by the plan."""
    transfers = of_data(layout, sequence)
    return float(sum(t.sent for t in transfers if t.algorithm != ALL_REDUCE))


@value
def hybrid_out_of_node(layout: Layout, sequence: int = 8192) -> float:
    """Bytes that a node of such ranks sends to others in a step, by the plan.

    A ring over all ranks leaves each node once; each rank of a node sums its own shard.
    """
    if layout.replicate == 1:
        return hybrid_inside(layout, sequence)
    transfers = of_data(layout, sequence)
    return float(NODE * sum(t.sent for t in transfers if t.algorithm == ALL_REDUCE))


def of_data(layout: Layout, sequence: int) -> list[Transfer]:
    shape = ModelShape.preset("llama-3-8b")
    found = traffic_per_step(shape, layout, sequence)
    return [transfer for transfer in found if transfer.axis == "data"]


@TABLES
def hybrid_runs() -> Table:
    """Steps on two networks, with one micro-batch and with four."""
    rows = []
    for network in NETWORKS:
        for micro_batches in (1, 4):
            plain, hybrid = (run_of(h, network, micro_batches) for h in (False, True))
            for run, kind in ((plain, False), (hybrid, True)):
                expected = hybrid_sent(kind, micro_batches)
                if abs(run["sent"] / expected - 1) > 1e-3:
                    raise runs.EvidenceError(f"{run['sent']} bytes, not {expected}")
            rows.append([
                network, f"{micro_batches}",
                bytes_(plain["sent"]), bytes_(hybrid["sent"]),
                as_seconds(plain["seconds"]), as_seconds(hybrid["seconds"]),
            ])  # fmt: skip
    header = ["between nodes", "micro-batches", "a node sends, FSDP", "hybrid",
              "step, FSDP", "hybrid"]  # fmt: skip
    return Table(header, rows, "lrrrrr")


@FIGURES
def hybrid_timeline(micro_batches: int = 2) -> str:
    """Rank 0 in one step of FSDP over all ranks, and of hybrid sharding."""
    steps = {"FSDP": run_of(False, SLOW, micro_batches),
             "hybrid": run_of(True, SLOW, micro_batches)}  # fmt: skip
    axis = TimeAxis(max(step["seconds"] for step in steps.values()), LEFT, WIDTH)
    parts, top = [], 4.0
    for name, step in steps.items():
        parts.append(text(6, top + 10, name, "xt-label"))
        parts.append(text(WIDTH - 6, top + 10, as_seconds(step["seconds"]), "xt-tick",
                          "end"))  # fmt: skip
        top += 16
        for row, (lane, colour) in enumerate(LANES.items()):
            y = top + ROW * row
            parts.append(text(LEFT - 6, y + 10, lane, "xt-tick", "end"))
            parts += [
                axis.bar(lane, begin, end, y, ROW - 5, colour, least=0.6)
                for what, begin, end in step["bars"]
                if what == lane
            ]
        top += ROW * len(LANES)
        at = axis.at(step["seconds"])
        parts += [line(at, top - ROW * len(LANES), at, top, "xt-grid"), axis.base(top)]
        top += 10
    parts += axis.ends(top + 4)
    words = "; ".join(
        f"{name}: {as_seconds(step['seconds'])}, rank 0 computes for "
        f"{as_seconds(busy(step))}" for name, step in steps.items()
    )  # fmt: skip
    title = "A step of FSDP and of hybrid sharding over time"
    return document(WIDTH, top + 12, parts, title, words)


def busy(step: dict[str, Any]) -> float:
    """Seconds in which rank 0 computes."""
    return sum(end - begin for lane, begin, end in step["bars"] if lane == "computes")
