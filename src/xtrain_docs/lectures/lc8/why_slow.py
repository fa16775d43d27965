"""The page on slow steps: four causes and their cures, each traced over two steps.

straggler    rank 3 loses time in each layer of forward
data         a batch takes longer to read; read while the step before runs, or not
checkpoint   nothing is trained while one is written, or only while it is copied
exposed      tensor ranks on two nodes, so that sums cross the network
"""

from collections.abc import Iterable
from itertools import combinations
from typing import Any, NamedTuple

import torch.distributed as dist

from xtrain.cluster import advance, now, table
from xtrain.cluster.chrome_trace import chrome_trace
from xtrain.cluster.draw import Piece
from xtrain.cluster.recorder import Span
from xtrain.model import XtrainConfig
from xtrain.model.layer import DecoderLayer
from xtrain.plan import Layout
from xtrain.train.dry_run_step import DryStep
from xtrain.train.recipe import Recipe
from xtrain.train.recipe_parts import Data
from xtrain.train.stragglers import Seconds, slow_ranks

from ... import runs
from ...amounts import percent, seconds
from ...downloads import data_url
from ...figures import REGISTRY as FIGURES
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .traced_step import GPU, recorded, rows_svg, without_folder

ROWS, SEQUENCE, STEPS = 3, 4096, 2  # of a data rank; and how many steps are traced
LAYOUT = Layout(data=2, tensor=2, zero=3, micro_batch=ROWS)
MODEL = XtrainConfig(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336,
    num_hidden_layers=3, num_attention_heads=32, num_key_value_heads=8,
)  # fmt: skip
RECIPE = Recipe(
    model=MODEL, layout=LAYOUT, data=Data(sequence=SEQUENCE), dtype="bfloat16"
)
DATA = ((0, 2), (1, 3))
"""The groups of data ranks."""
NEAR, FAR = (1e-6, 450e9), (5e-6, 50e9)
"""Latency in seconds and bytes a second, within a node and between two."""


class Case(NamedTuple):
    """What makes these steps slow, in seconds; nothing unless given."""

    late: float = 0.0
    """That rank 3 loses in each layer."""
    load: float = 0.0
    """That a batch takes to read."""
    ahead: bool = False
    """A worker reads it while the step before runs."""
    save: float = 0.0
    """In which the ranks stop for a checkpoint, after the last step."""
    apart: bool = False
    """Tensor ranks are on two nodes; all on one unless given."""


CASES = {
    "healthy": Case(),
    "straggler": Case(late=12e-3),
    "data": Case(load=34e-3),
    "data ahead": Case(load=34e-3, ahead=True),
    "checkpoint": Case(save=68e-3),
    "checkpoint behind": Case(save=3e-3),
    "exposed": Case(apart=True),
}
CURES = {
    "straggler": "healthy", "data": "data ahead", "checkpoint": "checkpoint behind",
    "exposed": "healthy",
}  # fmt: skip
LOST = {"late": "h", "data": "message", "save": "collective"}
"""The colour of time in which a rank neither computes nor waits for another."""


class Loader:
    """Batches that take `load` seconds each to read."""

    def __init__(self, load: float, ahead: bool):
        self.load, self.ahead, self.ready = load, ahead, now() + load

    def next(self) -> None:
        """Wait until the next one is there."""
        advance(max(0.0, self.ready - now()) if self.ahead else self.load)
        self.ready = now() + self.load


def steps(late: float, load: float, ahead: bool, save: float) -> list[Any]:
    """Of this rank: the clock at the begin, and the time it lost: kind, begin, end.

    The first step learns the order of units and is not counted.
    """
    step, loader = DryStep(RECIPE), Loader(load, ahead)
    lost: list[tuple[str, float, float]] = []

    def lose(kind: str, amount: float) -> None:
        lost.append((kind, now(), now() + amount))
        advance(amount)

    for layer in step.model.parts[0].modules():
        if isinstance(layer, DecoderLayer) and late and dist.get_rank() == 3:
            layer.register_forward_pre_hook(lambda *_: lose("late", late))
    begun = 0.0
    for number in range(1 + STEPS):
        begun = now() if number == 1 else begun
        since = now()
        loader.next()
        lost.append(("data", since, now()))
        step.step()
    lose("save", save)
    return [begun, lost]


def traced(name: str) -> dict[str, Any]:
    """Two steps of a case, as its picture and its numbers need them."""
    case = CASES[name]
    links = {
        (a, b): FAR if case.apart and (a, b) not in DATA else NEAR
        for a, b in combinations(range(LAYOUT.gpus), 2)
    }
    record, results = recorded(table(4, links), GPU, steps, *case[:4])
    begun = results[0][0]
    lost = [
        [(kind, a - begun, b - begun) for kind, a, b in pieces if begun <= a < b]
        for _, pieces in results
    ]
    return without_folder({
        "end": record.makespan,
        "spans": [short(record.spans(rank)) for rank in range(LAYOUT.gpus)],
        "waits": [record.total(rank, "wait") for rank in range(LAYOUT.gpus)],
        "lost": lost,
        "trace": chrome_trace(record, name) if name == "exposed" else "",
    })  # fmt: skip


def short(spans: Iterable[Span]) -> list[Piece]:
    """Kind, begin and end to a microsecond, and what is called with which ranks."""
    found = []
    for span in spans:
        others = ", ".join(map(str, span.ranks))
        text = f"{span.call.partition('(')[0]} of ranks {others}" if span.call else ""
        found.append((span.kind, round(span.start, 6), round(span.end, 6), text))
    return found


def case(name: str) -> dict[str, Any]:
    """What `traced` gave."""
    found: dict[str, Any] = runs.remembered(traced, 1, name)[0]
    return found


def lost(name: str, rank: int, kind: str) -> float:
    """Seconds that a rank neither computed nor waited for others."""
    return float(sum(b - a for what, a, b in case(name)["lost"][rank] if what == kind))


def mfu(length: float) -> float:
    """Of a step that takes so many seconds; the mask's pairs count."""
    tokens = LAYOUT.data * ROWS * SEQUENCE
    flops = MODEL.flops_per_token(SEQUENCE, causal=True) * tokens
    return flops / (GPU.flops * LAYOUT.gpus * length)


@value
def slow_seconds(name: str) -> float:
    """Of the one cause that a case has: of a layer, of a batch or of a checkpoint."""
    return max(CASES[name].late, CASES[name].load, CASES[name].save)


@value
def slow_mfu(name: str, wall: bool = False) -> float:
    """As the log has it, which leaves out checkpoints, or by the wall clock."""
    length = case(name)["end"] - (0.0 if wall else lost(name, 0, "save"))
    return mfu(length / STEPS)


def of_ranks(name: str) -> list[Seconds]:
    """What `log.stragglers` compares, of each rank a step."""
    run = case(name)
    length = run["end"] - lost(name, 0, "save")
    return [
        Seconds(
            f"rank {rank}",
            (length - wait) / STEPS,
            wait / STEPS,
            lost(name, rank, "data") / STEPS,
        )
        for rank, wait in enumerate(run["waits"])
    ]


@value
def slow_share(name: str, what: str = "data") -> float:
    """Of a step by the log: waiting for data; the most or least waiting for ranks."""
    ranks = of_ranks(name)
    length = ranks[0].busy + ranks[0].waiting
    if what == "data":
        return ranks[0].data / length
    pick = max if what == "most" else min
    return pick(rank.waiting for rank in ranks) / length


@TABLES
def slow_numbers() -> Table:
    """What tells the cases apart, in numbers that a run has."""
    header = ["case", "MFU, log", "MFU, wall clock", "data_wait", "waits for ranks",
              "slow rank"]  # fmt: skip
    rows = []
    for name in ("healthy", *CURES):
        named = slow_ranks(of_ranks(name))
        waits = [percent(slow_share(name, what)) for what in ("least", "most")]
        rows.append([
            name, percent(slow_mfu(name)), percent(slow_mfu(name, True)),
            percent(slow_share(name)), " to ".join(dict.fromkeys(waits)),
            named[0].text.split(" is slow")[0] if named else "none",
        ])  # fmt: skip
    return Table(header, rows, "lrrrrl")


@FIGURES
def slow_steps(name: str, cured: bool = False) -> str:
    """All ranks in two steps of a case, or of its cure on the same axis of time."""
    shown = CURES[name] if cured else name
    run, end = case(shown), case(name)["end"]
    rows: dict[str, list[Any]] = {}
    for rank in range(LAYOUT.gpus):
        pieces = [(LOST[kind], a, b, kind) for kind, a, b in run["lost"][rank]]
        rows[f"rank {rank}"] = [*run["spans"][rank], *pieces]
    words = f"{seconds(run['end'])}, MFU {percent(slow_mfu(shown, True))}"
    marks = [(0.0, "start", "two steps"), (run["end"], "end", words)]
    drawing = rows_svg(rows, end, f"Two steps: {shown}", (0.0, run["end"]), marks)
    if not run["trace"] or cured:
        return drawing
    file = data_url(run["trace"], "application/json")
    link = f'<a class="xt-download" download="exposed.json" href="{file}">'
    return f"{drawing}<p>{link}Download these steps for Perfetto</a></p>"
