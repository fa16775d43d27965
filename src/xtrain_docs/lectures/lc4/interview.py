"""Tables of the errata and the questions of lc4: calls, bytes and seconds."""

from collections import Counter
from typing import Any

from xtrain.plan import (
    Accelerator,
    Link,
    ModelShape,
    activation_memory,
    collective_time,
    collective_traffic,
)

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from ...values import bytes_, digits, percent, seconds

us = 1e-6
WIDER = 2
"""The column layer of the runs has this many times as many outputs as inputs."""
LAYER_WORDS = {
    "column": "column",
    "column, gathered": "column, output gathered",
    "row": "row",
    "row, splitting": "row, splits a whole input",
    "column, sequence": "column, slices of the sequence",
    "row, sequence": "row, slices of the sequence",
}
EXPECTED: dict[str, tuple[list[tuple[str, str]], list[tuple[str, str]]]] = {
    "column": ([], [("all-reduce", "dx")]),
    "column, gathered": ([("all-gather", "y")], [("all-reduce", "dx")]),
    "row": ([("all-reduce", "y")], []),
    "row, splitting": ([("all-reduce", "y")], [("all-gather", "dx")]),
    "column, sequence": (
        [("all-gather", "x")],
        [("all-gather", "x"), ("reduce-scatter", "dx")],
    ),
    "row, sequence": ([("reduce-scatter", "y")], [("all-gather", "dy")]),
}
"""What each layer must call forward and backward, and with which tensor."""


def elements_of(layer: str, tensor: str) -> int:
    """Of the whole input or output of a layer of the runs."""
    from .runs_errata import BATCH, HIDDEN, SEQUENCE

    wide = tensor.endswith("y") == layer.startswith("column")
    return BATCH * SEQUENCE * HIDDEN * (WIDER if wide else 1)


def checked_calls(layer: str, ranks: int) -> dict[str, list[list[Any]]]:
    """The recorded calls; EvidenceError unless they are those of EXPECTED."""
    from .runs_errata import calls_of_layer

    expected = [
        [[op, elements_of(layer, tensor)] for op, tensor in part]
        for part in EXPECTED[layer]
    ]
    for found in runs.remembered(calls_of_layer, ranks, layer):
        if [found["forward"], found["backward"]] != expected:
            raise EvidenceError(f"{layer} on {ranks} ranks: {found}, not {expected}")
    return dict(zip(("forward", "backward"), expected, strict=True))


@REGISTRY
def calls_of_linear_layers(ranks: int = 4, show: str = "all") -> Table:
    """What column and row layers call, recorded; show=columns or show=others."""
    columns = ("column", "column, gathered")
    rows = []
    for layer, words in LAYER_WORDS.items():
        if show in ("all", "columns" if layer in columns else "others"):
            checked_calls(layer, ranks)
            rows.append([words, *map(_said, EXPECTED[layer])])
    return Table(["layer", "forward", "backward"], rows, "lll")


def _said(calls: list[tuple[str, str]]) -> str:
    return ", ".join(f"{op} of `{tensor}`" for op, tensor in calls) or "nothing"


@REGISTRY
def bytes_of_two_mlps(ranks: int = 4) -> Table:
    """Bytes that each rank sends in the MLP of column layers alone, and of both."""
    from .runs_errata import BATCH, HIDDEN, MLPS, SEQUENCE, bytes_of_mlp

    unit = BATCH * SEQUENCE * HIDDEN * runs.ITEMSIZE * (ranks - 1) // ranks
    expected = {MLPS[0]: (5, 10), MLPS[1]: (2, 2)}
    rows = []
    for name, times in expected.items():
        for forward, backward, _ in runs.remembered(bytes_of_mlp, ranks, name):
            if (forward, backward) != tuple(unit * n for n in times):
                raise EvidenceError(f"{name}: sent {forward}, {backward}, not {times}")
        for words, n in zip(("forward", "backward"), times, strict=True):
            rows.append(
                [name, words, f"${n}\\,\\frac{{N-1}}{{N}}bsh$", count(unit * n)]
            )
    return Table(["MLP", "", "that is", f"bytes on {ranks} ranks"], rows, "llrr")


MODES = {
    "tensor parallelism": (False, False),
    "the same, all recomputed": (False, True),
    "with slices of the sequence": (True, False),
}


def layer_traffic(mode: str, ranks: int) -> tuple[Counter[str], Counter[str], int]:
    """Calls forward and backward, and bytes, that one layer more adds to a step."""
    from .runs_errata import traffic_of_model

    one, two = (
        runs.remembered(traffic_of_model, ranks, layers, *MODES[mode], "torch")[0]
        for layers in (1, 2)
    )
    named = [
        Counter(op for op, _ in b) - Counter(op for op, _ in a)
        for a, b in zip(one["calls"], two["calls"], strict=True)
    ]
    sent = [
        [sum(found["sent"]) for found in
         runs.remembered(traffic_of_model, ranks, layers, *MODES[mode], "ring")]
        for layers in (1, 2)
    ]  # fmt: skip
    more = {b - a for a, b in zip(*sent, strict=True)}
    if len(more) != 1:
        raise EvidenceError(f"{mode}: ranks send {more}")
    return named[0], named[1], more.pop()


@REGISTRY
def sums_per_layer(ranks: int = 4) -> Table:
    """What one layer of the decoder calls and sends, forward and backward."""
    from .runs_errata import BATCH, HIDDEN, SEQUENCE

    elements = BATCH * SEQUENCE * HIDDEN * (ranks - 1) / ranks
    rows = []
    for mode in MODES:
        forward, backward, sent = layer_traffic(mode, ranks)
        units = sent / runs.ITEMSIZE / elements
        rows.append([mode, _counted(forward), _counted(backward), count(sent),
                     f"${digits(units, 4)}\\,\\frac{{t-1}}{{t}}bsh$"])  # fmt: skip
    header = ["", "forward", "backward", f"bytes, {ranks} ranks", "in elements"]
    return Table(header, rows, "lllrr")


def _counted(calls: Counter[str]) -> str:
    return ", ".join(f"{number} {op}" for op, number in sorted(calls.items()))


def kept(ranks: int, sequence_parallel: bool) -> dict[str, int]:
    """Bytes that autograd keeps of one layer on each rank."""
    from .runs_errata import bytes_saved

    found: list[dict[str, int]] = runs.remembered(bytes_saved, ranks, sequence_parallel)
    if any(other != found[0] for other in found):
        raise EvidenceError(f"ranks keep {found}")
    return found[0]


@REGISTRY
def bytes_kept_by_layer(most: int = 4) -> Table:
    """Bytes that a layer's forward keeps for backward, by ranks."""
    counts = [n for n in (1, 2, 4) if n <= most]
    rows = []
    for words, split in (("tensor parallelism", False), ("and the sequence", True)):
        found = [kept(n, split)["layer"] for n in counts]
        shares = [percent(f / found[0]) for f in found[1:]]
        rows.append([words, *map(count, found), *shares])
    header = ["cut", *(f"{n} rank{'s' * (n > 1)}" for n in counts),
              *(f"share on {n}" for n in counts[1:])]  # fmt: skip
    return Table(header, rows, "l" + "r" * (2 * len(counts) - 1))


GPT_3 = {"sequence": 2048, "batch": 1, "hidden": 12288, "heads": 96}


@REGISTRY
def activations_of_gpt_3(tensor: int = 8) -> Table:
    """Bytes per layer that GPT-3 keeps of a sequence, by how it is cut."""
    ways: dict[str, dict[str, Any]] = {
        "one device": {},
        "tensor parallelism": {"tensor": tensor},
        "and the sequence": {"tensor": tensor, "sequence_parallel": True},
    }
    rows = []
    for words, options in ways.items():
        found = [
            activation_memory(**GPT_3, **options, recompute=way)
            for way in ("none", "selective", "full")
        ]
        rows.append([words, *map(bytes_, found)])
    header = ["cut", "everything kept", "scores recomputed", "all recomputed"]
    return Table(header, rows, "lrrr")


LINKS = (
    ("NVLink 4, in a node", 2, "nvlink4"),
    ("NVLink 4, in a node", 8, "nvlink4"),
    ("InfiniBand NDR", 8, "infiniband-ndr"),
    ("InfiniBand NDR", 16, "infiniband-ndr"),
)


def layer_seconds(
    shape: ModelShape, tokens: int, ranks: int, alpha: float, link: str, rate: float
) -> tuple[float, float]:
    """Four all-reduces of a layer in 16 bits; and its matrices at `rate` FLOP/s."""
    size = tokens * shape.hidden_size * 2
    sums = 4 * collective_time(
        "ring_all_reduce", size, ranks, alpha, Link.preset(link).beta
    )
    flops = shape.flops_per_token(tokens) - 6 * shape.vocab_size * shape.hidden_size
    return sums, flops / shape.num_hidden_layers * tokens / ranks / rate


@REGISTRY
def seconds_of_tensor_parallelism(
    model: str = "llama-3-70b", tokens: int = 4096, alpha_us: float = 5
) -> Table:
    """A layer's sums against its computation, by link and number of ranks."""
    shape, rate = ModelShape.preset(model), 0.4 * Accelerator.preset("h100").flops
    rows = []
    for words, ranks, link in LINKS:
        sums, work = layer_seconds(shape, tokens, ranks, alpha_us * us, link, rate)
        rows.append([words, str(ranks), seconds(sums), seconds(work),
                     percent(sums / (sums + work))])  # fmt: skip
    header = ["link", "ranks", "sums", "matrices", "sums' share"]
    return Table(header, rows, "lrrrr")


@REGISTRY
def tensor_or_pipeline(
    model: str = "llama-3-70b", ranks: int = 8, tokens: int = 4096
) -> Table:
    """What a device sends for one micro-batch under either parallelism; 16 bits."""
    shape = ModelShape.preset(model)
    size = tokens * shape.hidden_size * 2
    reduce = collective_traffic("ring_all_reduce", size, ranks).max_sent
    ways = {
        f"tensor, {ranks} ranks": (4 * shape.num_hidden_layers, reduce),
        f"pipeline, {ranks} stages": (2, size),
    }
    rows = [
        [words, str(times), bytes_(each), bytes_(times * each),
         *(seconds(times * each * Link.preset(link).beta)
           for link in ("nvlink4", "infiniband-ndr"))]
        for words, (times, each) in ways.items()
    ]  # fmt: skip
    header = ["", "times", "each", "together", "over NVLink 4", "over InfiniBand NDR"]
    return Table(header, rows, "lrrrrr")


KINDS = ("tensor parallelism", "ZeRO-3")
SIZES = ((16, 12), (16, 24), (32, 12))


@REGISTRY
def activations_or_weights(ranks: int = 2) -> Table:
    """Bytes of a step when the tokens double, and when the width doubles."""
    from .runs_interview import bytes_of_step

    rows = []
    for kind in KINDS:
        sent = [
            max(runs.remembered(bytes_of_step, ranks, kind, *size)) for size in SIZES
        ]
        ratios = [f"{digits(found / sent[0])}x" for found in sent[1:]]
        rows.append([kind, count(sent[0]), *ratios])
    header = ["", "bytes of a step", "twice the tokens", "twice the width"]
    return Table(header, rows, "lrrr")
