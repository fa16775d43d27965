"""The page on FSDP's time at 256 ranks: the recorded steps, and the closed forms."""

import json
from functools import cache
from typing import Any

from xtrain.bench.cluster_fsdp import CONFIG
from xtrain.cluster.topology import NETWORK_LATENCY, NODE, NVLINK_LATENCY
from xtrain.plan.hardware import Accelerator

from ... import config
from ...amounts import seconds as as_seconds
from ...figures import REGISTRY as FIGURES
from ...svg import TimeAxis, document, fit, swatches, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value

RECORD = config.ROOT / "docs" / "data" / "cluster" / "fsdp.json"
GPU = Accelerator.preset("h100")
LANES = {"computes": (2, 0), "all-gather": (0, 1), "reduce-scatter": (1, 2)}
# colour, row
KINDS = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
WIDTH, LEFT, ROW, HEAD = 400, 6, 13, 20


@cache
def recorded() -> dict[tuple[int, int], dict[str, Any]]:
    """Rank 0's second step, by ranks and tokens of a rank."""
    rows = json.loads(RECORD.read_text())
    return {(row["ranks"], row["tokens"]): row for row in rows}


@value
def fsdp_step(ranks: int = 256, tokens: int = 2048) -> float:
    """Virtual seconds of a step."""
    return recorded()[ranks, tokens]["seconds"]


@value
def fsdp_waits(ranks: int = 256, tokens: int = 2048) -> float:
    """Seconds of a step in which a rank does not compute."""
    waits = recorded()[ranks, tokens]["waits"]
    return sum(end - begin for begin, end, _ in waits)


def flights(ranks: int, tokens: int, kind: str) -> list[tuple[int, float, float]]:
    """The collectives of a kind: bytes, begin, end."""
    found = recorded()[ranks, tokens]["flights"]
    return [tuple(rest) for what, *rest in found if what == kind]


@value
def layer_bytes() -> int:
    """A layer's weights in bf16, as the all-gather has them."""
    return flights(256, 2048, "all_gather")[1][0]


@value
def root_bytes() -> int:
    """The weights of embedding, head and last norm in bf16."""
    return flights(256, 2048, "all_gather")[0][0]


@value
def gather_formula(nbytes: float, ranks: int) -> float:
    """A ring in a node, or as many rings between nodes as a node has adapters."""
    assert GPU.network is not None
    if ranks <= NODE:
        latency, bandwidth = NVLINK_LATENCY, GPU.link.bandwidth
    else:
        latency, bandwidth = NETWORK_LATENCY, NODE * GPU.network.bandwidth
    return (ranks - 1) * (latency + nbytes / ranks / bandwidth)


@value
def gather_recorded(ranks: int, tokens: int, number: int = 1) -> float:
    """Seconds of a step's all-gather: 0 is the root's, 1 the first layer's."""
    _, begin, end = flights(ranks, tokens, "all_gather")[number]
    return end - begin


@value
def layer_forward(ranks: int, tokens: int) -> float:
    """Seconds of compute between the waits for two layers' weights.

    A gather of the next layer starts as a layer begins to compute.
    """
    gathers = flights(ranks, tokens, "all_gather")
    between = gathers[3][1] - gathers[2][1]  # one layer begins, then the next
    waited = sum(
        end - begin
        for begin, end, _ in recorded()[ranks, tokens]["waits"]
        if gathers[2][1] <= begin < gathers[3][1]
    )
    return between - waited


@value
def layer_matmuls(tokens: int) -> float:
    """Seconds of a layer's matrices and attention at the printed peak, in forward."""
    hidden, weights = CONFIG.hidden_size, layer_bytes() / 2
    return (2 * weights * tokens + 4 * tokens**2 * hidden) / GPU.flops


@value
def tokens_to_hide(ranks: int) -> float:
    """Tokens of a rank at which a layer's forward takes as long as its all-gather."""
    took = layer_forward(256, 2048) / 2048
    return gather_formula(layer_bytes(), ranks) / took


@TABLES
def fsdp_time_runs() -> Table:
    """What a layer takes, recorded, and the formula."""
    rows = []
    for ranks, tokens in recorded():
        gather = gather_recorded(ranks, tokens)
        formula = gather_formula(layer_bytes(), ranks)
        waits, step = fsdp_waits(ranks, tokens), fsdp_step(ranks, tokens)
        rows.append(
            [ranks, f"{tokens:,}", as_seconds(gather, 4), as_seconds(formula, 4),
             as_seconds(layer_forward(ranks, tokens)), as_seconds(step),
             f"{waits / step:.0%}"]
        )  # fmt: skip
    header = ["ranks", "tokens", "all-gather", "formula", "forward of a layer", "step",
              "waits"]  # fmt: skip
    return Table(header, rows, "rrrrrrr")


@FIGURES
def fsdp_steps() -> str:
    """The recorded steps, one below the other on one axis."""
    last = max(row["seconds"] for row in recorded().values())
    axis = TimeAxis(last, LEFT, WIDTH)
    parts, top = swatches(list(LANES), y=4.0)
    top += 22.0
    for (ranks, tokens), row in recorded().items():
        words = f"{ranks} ranks, {tokens:,} tokens each: {as_seconds(row['seconds'])}"
        parts.append(text(LEFT, top + 13, words, "xt-label"))
        for lane, begin, end in bars(row):
            colour, place = LANES[lane]
            y = top + HEAD + ROW * place
            parts.append(axis.bar(lane, begin, end, y, ROW - 2, colour, least=0.5))
        bottom = top + HEAD + ROW * len(LANES)
        parts.append(axis.base(bottom))
        top = bottom + 6
    parts += axis.ends(top + 8)
    words = "At 8 ranks the rank computes nearly all the time, at 256 it waits."
    drawing = document(WIDTH, int(top + 14), parts, "Steps of FSDP over time", words)
    return fit(drawing, WIDTH)


def bars(row: dict[str, Any]) -> list[tuple[str, float, float]]:
    """Compute between the waits, and the collectives."""
    found, clock = [], 0.0
    for begin, end, _ in [*row["waits"], (row["seconds"], row["seconds"], "")]:
        if begin > clock:
            found.append(("computes", clock, begin))
        clock = end
    for kind, _, begin, end in row["flights"]:
        found.append((KINDS[kind], begin, end))
    return found
