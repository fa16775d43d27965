"""The page on FSDP at 256 ranks: recorded steps, and the closed form."""

from collections.abc import Iterator
from functools import cache
from typing import Any

from xtrain.bench.cluster_fsdp_step import LAYERS, WIDTH
from xtrain.cluster.draw import document
from xtrain.cluster.topology import NETWORK_LATENCY, NODE, NVLINK_LATENCY
from xtrain.plan.hardware import Accelerator

from ...amounts import percent
from ...amounts import seconds as as_seconds
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .clock import recorded as record_of

GPU = Accelerator.preset("h100")
ADAPTER = 50e9
PARAMETERS = 8 * WIDTH**2  # of a unit
GATHERED, REDUCED = 2, 4  # bytes of a parameter, of its gradient
CAST, PACKED, UPDATED = 6, 6, 26  # bytes that pass memory for each
LEFT, RIGHT, ROW, WIDE = 92.0, 4.0, 17.0, 400
ROWS = (("computes", "compute"), ("all-gather", "message"),
        ("reduce-scatter", "collective"))  # fmt: skip


@cache
def recorded() -> dict[tuple[int, int], dict[str, Any]]:
    """The runs by ranks and tokens."""
    rows = record_of("fsdp_step.json")
    return {(row["ranks"], row["tokens"]): row for row in rows}


@value
def fsdp_seconds(ranks: int = 256, tokens: int = 4096) -> float:
    """Virtual seconds of a step."""
    return recorded()[ranks, tokens]["step"]


@value
def fsdp_waiting(ranks: int = 256, tokens: int = 4096) -> float:
    """The share of a step in which rank 0 waits."""
    run = recorded()[ranks, tokens]
    return sum(end - start for start, end in run["waits"]) / run["step"]


@value
def fsdp_collective(nbytes: int, ranks: int) -> float:
    """Seconds of a ring over a unit, `nbytes` for each parameter."""
    one = ranks <= NODE
    alpha = NVLINK_LATENCY if one else (7 * NVLINK_LATENCY + NETWORK_LATENCY) / NODE
    beta = 1 / GPU.link.bandwidth if one else 1 / (NODE * ADAPTER)
    return (ranks - 1) * (alpha + nbytes * PARAMETERS / ranks * beta)


@value
def fsdp_compute(tokens: int) -> tuple[float, float, float]:
    """Seconds of a unit: one of its matrix products, its forward, its backward."""
    product = 8 * WIDTH**2 * tokens / GPU.flops
    memory = GPU.memory_bandwidth
    forward = 2 * product + 16 * WIDTH * tokens / memory
    gradients = (PACKED + CAST) * PARAMETERS
    return product, forward, (
        4 * product + (24 * WIDTH * tokens + gradients) / memory
    )  # fmt: skip


@value
def fsdp_formula(ranks: int = 256, tokens: int = 4096) -> float:
    """The closed form of a step."""
    g, s = (fsdp_collective(size, ranks) for size in (GATHERED, REDUCED))
    m, f, b = fsdp_compute(tokens)
    loss = 2 * WIDTH * tokens / GPU.memory_bandwidth
    u = UPDATED * PARAMETERS / ranks / GPU.memory_bandwidth
    forward = g + f + (LAYERS - 1) * max(f, g) + loss
    middle = (LAYERS - 2) * max(b + u, s + g)
    return forward + g + max(b, g) + middle + max(b - m, s) + max(s, u) + u


@TABLES
def fsdp_runs() -> Table:
    """Each run beside its closed form."""
    rows = []
    for (ranks, tokens), run in recorded().items():
        formula = fsdp_formula(ranks, tokens)
        rows.append([
            f"{ranks}", f"{tokens:,}", as_seconds(run["step"], 4),
            as_seconds(formula, 4), percent(run["step"] / formula - 1, 1),
            percent(fsdp_waiting(ranks, tokens)),
        ])  # fmt: skip
    header = ["ranks", "tokens of each", "run", "closed form", "difference", "waits"]
    return Table(header, rows, "rrrrrr")


@FIGURES
def fsdp_step_timeline(ranks: int = 256, tokens: int = 4096) -> str:
    """Rank 0 in one step: what it computes, and what is in flight."""
    run = recorded()[ranks, tokens]
    parts, scale = [], (WIDE - LEFT - RIGHT) / run["step"]
    for row, (name, kind) in enumerate(ROWS):
        y = 4 + ROW * row
        parts.append(f'<text class="t" x="0" y="{y + 11}">{name}</text>')
        for start, end in pieces(run, name):
            parts.append(
                f'<rect class="{kind}" x="{LEFT + start * scale:.2f}" y="{y}" '
                f'width="{(end - start) * scale:.2f}" height="{ROW - 4}">'
                f"<title>{name}: {as_seconds(start)} to {as_seconds(end)}</title>"
                "</rect>"
            )
    foot = 4 + ROW * len(ROWS)
    middle = LEFT + run["forward"] * scale
    parts += [
        f'<path class="a" d="M{middle:.1f} 2V{foot}"/>',
        f'<text class="t" x="{LEFT}" y="{foot + 12}">forward</text>',
        f'<text class="t" x="{middle + 4:.1f}" y="{foot + 12}">backward</text>',
        f'<text class="t" x="{WIDE - RIGHT}" y="{foot + 12}" text-anchor="end">'
        f"{as_seconds(run['step'])}</text>",
    ]
    title = f"A step of FSDP on {ranks} ranks, {tokens} tokens each, as rank 0 sees it"
    return document(WIDE, foot + 18, parts, title)


def pieces(run: dict[str, Any], name: str) -> Iterator[tuple[float, float]]:
    """The times of one row."""
    if name == "computes":
        clock = 0.0
        for start, end in (*run["waits"], (run["step"], run["step"])):
            if start > clock:
                yield clock, start
            clock = end
        return
    for kind, nbytes, start, end in run["collectives"]:
        if kind.replace("_", "-") == name and nbytes:
            yield start, end
