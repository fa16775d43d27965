"""The page on one run: its curve in two layouts, and one step on a virtual cluster."""

import re
import runpy
import tempfile
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from xtrain.cluster import advance, dgx_h100, now
from xtrain.cluster.chrome_trace import chrome_trace
from xtrain.cluster.draw import timeline_svg
from xtrain.comm.agreement import value_of_rank_0
from xtrain.model import XtrainConfig
from xtrain.model.layer import DecoderLayer
from xtrain.plan import Layout
from xtrain.train import accumulate, clip_grad_norm, wrapped_model

from ... import config, runs
from ...amounts import seconds
from ...downloads import data_url
from ...figures import REGISTRY as FIGURES
from ...generated import digest
from ...spine.compare import power
from ...svg import Axis, line_chart
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .traced_step import (
    GPU,
    WIDE,
    recorded,
    rows_svg,
    spans_of,
    without_folder,
)

SNIPPET = config.ROOT / "snippets/lc8/one_run.py"
NARROWER = 16  # than a model of width 4096: as many times fewer FLOPs a second
SLOWER = replace(GPU, flops=GPU.flops / NARROWER)
MODEL = XtrainConfig(
    vocab_size=256, hidden_size=4096 // NARROWER, intermediate_size=688,
    num_hidden_layers=3, num_attention_heads=8,
)  # fmt: skip
ROWS, SEQUENCE = 2, 512  # of a data rank
LATE = 20e-6  # seconds that the slow rank loses in each layer
PHASES = ("forward", "backward", "clip", "optimizer")
AXES = {"0, 1": "tensor", "0, 2": "data", "": "all ranks"}
"""Which ranks rank 0 shares an axis with."""


def curve(snippet: str, alone: bool) -> list[tuple[float, float]]:
    """On every rank: loss and norm of each step; `snippet` is the program's digest."""
    with chdir(config.ROOT):
        made = runpy.run_path(str(SNIPPET))
        layouts = (made["HERE"], made["ELSEWHERE"])
        folder = tempfile.mkdtemp() if dist.get_rank() == 0 else ""
        folder = value_of_rank_0(folder, None)
        lines = made["one_run"](folder, *(("", "") if alone else layouts))
    return [(line["loss"], line["grad_norm"]) for line in lines]


def curves() -> tuple[list[list[float]], list[list[float]]]:
    """Of one process, and of four ranks."""
    snippet = digest(SNIPPET.read_bytes())
    one = runs.remembered(curve, 1, snippet, True)[0]
    return one, runs.remembered(curve, 4, snippet, False)[0]


@value
def one_run(step: int, what: str = "loss") -> float:
    """Loss or norm of a step, which counts from 1, in one process."""
    return curves()[0][step - 1][("loss", "norm").index(what)]


@value
def one_run_difference(what: str = "loss") -> str:
    """The largest difference of a step between four ranks and one process."""
    key = ("loss", "norm").index(what)
    return power(max(abs(a[key] - b[key]) for a, b in zip(*curves(), strict=True)))


@FIGURES
def one_run_curve() -> str:
    """The loss of one process, and of four ranks before and after they resume."""
    one, four = ([(i, loss) for i, (loss, _) in enumerate(c, 1)] for c in curves())
    stop = runpy.run_path(str(SNIPPET))["STOP"]
    series = {"2 data × 2 tensor": four[:stop], "2 pipeline × 2 context": four[stop:]}
    series["one process"] = one
    title = "Loss of each step: four ranks, and one process"
    marks = [(stop + 0.5, "resumed")]
    return line_chart(series, Axis("step"), Axis("loss"), title, marks=marks)


def step(late: float) -> list[float]:
    """On each rank: clocks of the second step: begin, and the ends of all phases.

    The first one learns the order of units. Rank 3 loses `late` seconds a layer.
    """
    model = wrapped_model(MODEL, Layout(data=2, tensor=2, zero=3), dtype=torch.float32)
    optimizer = model.optimizer(torch.optim.AdamW)
    tokens, clocks = torch.zeros(ROWS, SEQUENCE, dtype=torch.long), [0.0]
    model.parts[0].register_forward_hook(lambda *_: clocks.append(now()))
    for layer in model.parts[0].modules():
        if isinstance(layer, DecoderLayer) and late and dist.get_rank() == 3:
            layer.register_forward_pre_hook(lambda *_: advance(late))
    for _ in range(2):
        clocks[:] = [now()]
        accumulate(model, tokens, tokens)
        clocks.append(now())
        clip_grad_norm(model, 1.0)
        clocks.append(now())
        optimizer.step()
        optimizer.zero_grad()
        clocks.append(now())
    return clocks


def traced(late: float) -> dict[str, Any]:
    """A step of four ranks, from its begin on, as pictures and tables need it."""
    record, results = recorded(dgx_h100(1), SLOWER, step, late)
    begun, *ends = results[0]
    sent = [one for one in record.transfers if 0 in one.ranks]
    return without_folder({
        "ends": [end - begun for end in ends],
        "spans": spans_of(record, 0),
        "sent": [(one.kind, axis_of(one.ranks), one.start, one.end) for one in sent],
        "waits": [record.total(rank, "wait") / record.makespan for rank in range(4)],
        "drawing": timeline_svg(record, "A step on four ranks", WIDE),
        "trace": "" if late else chrome_trace(record, "one step"),
    })  # fmt: skip


def axis_of(ranks: Sequence[int]) -> str:
    return AXES.get(", ".join(map(str, ranks)), "all ranks")


def trace(slow: bool = False) -> dict[str, Any]:
    """What `traced` gave, with or without a slow rank."""
    found: dict[str, Any] = runs.remembered(traced, 1, LATE if slow else 0.0)[0]
    return found


@value
def one_run_waits(rank: int = 0, slow: bool = False) -> float:
    """The share of a step in which a rank waits."""
    return float(trace(slow)["waits"][rank])


@FIGURES
def one_run_ranks(slow: bool = False) -> str:
    """What four ranks do in a step."""
    return str(trace(slow)["drawing"])


@FIGURES
def one_run_step() -> str:
    """Rank 0 in a step: what it computes, and what it is in with which ranks."""
    run = trace()
    colours = {"all_gather": "message", "reduce_scatter": "h"}
    rows: dict[str, list[Any]] = {"rank 0": run["spans"], "tensor": [], "data": []}
    for kind, axis, start, end in run["sent"]:
        piece = (colours.get(kind, "collective"), start, end, f"{kind} over {axis}")
        rows.get(axis, rows["data"]).append(piece)
    ends = run["ends"]
    marks = [
        (0.0, "start", "forward"),
        (ends[0], "start", "backward"),
        (ends[-1], "end", "clip, optimizer"),
    ]
    title = "Rank 0 in a step of four ranks"
    drawing = rows_svg(rows, ends[-1], title, (0.0, *ends[:3]), marks)
    file = data_url(run["trace"], "application/json")
    link = f'<a class="xt-download" download="one_step.json" href="{file}">'
    return f"{drawing}<p>{link}Download the step of all ranks for Perfetto</a></p>"


@TABLES
def one_run_phases() -> Table:
    """Where the time of rank 0 goes, by phase."""
    run, rows, begin = trace(), [], 0.0
    for phase, end in zip(PHASES, run["ends"], strict=True):
        waits = dict.fromkeys(AXES.values(), 0.0)
        for kind, start, stop, call in run["spans"]:
            if kind == "wait" and begin <= start < end:
                group = re.search(r"in group ([\d, ]+\d)", call)
                waits[AXES[group[1] if group else ""]] += stop - start
        rows.append([phase, seconds(end - begin), *map(seconds, waits.values())])
        begin = end
    header = ["phase", "in all", *(f"waits for {name}" for name in AXES.values())]
    return Table(header, rows, "l" + "r" * (len(header) - 1))
