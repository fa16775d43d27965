"""Tables and the chart of the lc4 pages on single modules: what each of them sends."""

from dataclasses import dataclass
from typing import Any

from xtrain.plan import collective_traffic

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import Axis, bar_chart, fit
from ...tables import REGISTRY as TABLES
from ...tables import Table

RING = {
    "all-reduce": "ring_all_reduce",
    "all-gather": "ring_all_gather",
    "reduce-scatter": "ring_reduce_scatter",
}
FACTORS = {
    "all-reduce": "2\\,\\frac{N-1}{N}",
    "all-gather": "\\frac{N-1}{N}",
    "reduce-scatter": "\\frac{N-1}{N}",
}
RECORDED = {
    "allreduce": "all-reduce",
    "allgather_base": "all-gather",
    "reduce_scatter_base": "reduce-scatter",
    "send": "send",
}


@dataclass(frozen=True)
class Call:
    """A collective that a module should run: when, and the size of its whole tensor."""

    phase: str
    op: str
    size: str


def forward(op: str, size: str) -> Call:
    return Call("forward", op, size)


def backward(op: str, size: str) -> Call:
    return Call("backward", op, size)


CUT = (forward("all-reduce", "bsh"), backward("all-reduce", "bsh"))
SLICED = (
    forward("all-gather", "bsh"),
    forward("reduce-scatter", "bsh"),
    backward("all-gather", "bsh"),
    backward("all-gather", "bsh"),
    backward("reduce-scatter", "bsh"),
)
FORMULAS: dict[str, tuple[Call, ...]] = {
    "attention": CUT,
    "attention sp": SLICED,
    "swiglu": CUT,
    "swiglu sp": SLICED,
    "column only": (
        forward("all-gather", "bsf"),
        forward("all-gather", "bsh"),
        backward("all-reduce", "bsf"),
        backward("all-reduce", "bsh"),
    ),
    "norm": (),
    "norm sp": (backward("all-reduce", "h"),),
    "vocabulary": (forward("all-reduce", "bsh"),),
    "vocabulary sp": (forward("reduce-scatter", "bsh"), backward("all-gather", "bsh")),
    "hidden": (forward("all-gather", "bsh"),),
    "loss": (forward("all-reduce", "T"), forward("all-reduce", "2T")),
    "gathered loss": (forward("all-gather", "TV"),),
}
NAMES = {
    "attention": "attention",
    "attention sp": "attention, sequence-parallel",
    "swiglu": "SwiGLU, column then row",
    "swiglu sp": "SwiGLU, sequence-parallel",
    "column only": "two column layers that gather",
    "norm": "RMSNorm",
    "norm sp": "RMSNorm, sequence-parallel",
    "vocabulary": "embedding by vocabulary",
    "vocabulary sp": "by vocabulary, sequence-parallel",
    "hidden": "embedding by hidden size",
    "loss": "vocabulary-parallel loss",
    "gathered loss": "loss of gathered logits",
}
SHORT = {"swiglu": "column, row", "column only": "both columns"}
WIDTH = 400


def elements(size: str) -> int:
    """Of the tensor of one call in the runs."""
    from .runs_modules import BATCH, HIDDEN, INNER, SEQUENCE, TOKENS, VOCABULARY

    tokens = BATCH * SEQUENCE
    return {
        "bsh": tokens * HIDDEN,
        "bsf": tokens * INNER,
        "h": HIDDEN,
        "T": TOKENS,
        "2T": 2 * TOKENS,
        "TV": TOKENS * VOCABULARY,
    }[size]


def sent(call: Call, ranks: int, rank: int) -> int:
    """Bytes by the formula of a ring."""
    numel = elements(call.size)
    if call.size == "h":  # small: this backend sends it straight to every other rank
        return (ranks - 1) * numel * runs.ITEMSIZE
    traffic = collective_traffic(RING[call.op], numel, ranks)
    return traffic.bytes(runs.ITEMSIZE).sent[rank]


def measured(module: str, ranks: int) -> list[list[Any]]:
    """Rank 0's calls, [phase, call, tensor, sent]; EvidenceError unless the formula."""
    from .runs_modules import calls as run

    found = runs.remembered(run, ranks, module)
    for rank, of_rank in enumerate(found):
        actual = [[phase, RECORDED[op], out] for phase, op, _, out in of_rank]
        formula = [[c.phase, c.op, sent(c, ranks, rank)] for c in FORMULAS[module]]
        if actual != formula:
            raise EvidenceError(
                f"{module}, rank {rank} of {ranks}: {actual}, formula {formula}"
            )
    return found[0]


@TABLES
def module_calls(module: str = "swiglu", ranks: int = 4) -> Table:
    """The collectives of one forward and backward of a module, one row each."""
    found = measured(module, ranks)
    rows = []
    for call, (phase, _, _, out) in zip(FORMULAS[module], found, strict=True):
        rows.append([phase, call.op, f"${call.size}$",
                     f"${FACTORS[call.op]}\\,{call.size}$", count(out)])  # fmt: skip
    header = ["when", "call", "tensor", "elements sent", "bytes, measured"]
    return Table(header, rows, "lllrr")


@TABLES
def module_bytes(modules: str = "swiglu,column only") -> Table:
    """Bytes that a rank sends, forward and backward, on 2, 3 and 4 ranks."""
    rows = []
    for module in modules.split(","):
        cells = []
        for ranks in (2, 3, 4):
            found = measured(module, ranks)
            for phase in ("forward", "backward"):
                total = sum(call[3] for call in found if call[0] == phase)
                cells.append(count(total) if total else "-")
        rows.append([NAMES[module], *cells])
    header = ["", *(f"{n} ranks, {p}" for n in (2, 3, 4) for p in ("fwd", "bwd"))]
    return Table(header, rows, "l" + "r" * 6)


@FIGURES
def bytes_of_designs(modules: str = "swiglu,column only", ranks: int = 4) -> str:
    """Bytes that a rank sends in a forward and a backward, by module."""
    bars: dict[str, dict[str, float]] = {}
    for module in modules.split(","):
        found = measured(module, ranks)
        bars[SHORT[module]] = {
            phase: sum(call[3] for call in found if call[0] == phase) / 1024
            for phase in ("forward", "backward")
        }
    chart = bar_chart(
        bars,
        Axis("KiB that one rank sends", "linear", lambda n: f"{n:.3g}"),
        f"Bytes sent by design, {ranks} ranks",
        width=WIDTH,
    )
    return fit(chart, WIDTH)
