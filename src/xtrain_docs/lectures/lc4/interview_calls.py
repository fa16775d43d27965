"""Tables of the errata and the questions of lc4: what layers call and send."""

from collections import Counter
from typing import Any

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from ...values import digits

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
