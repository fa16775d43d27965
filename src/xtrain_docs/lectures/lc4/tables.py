"""Tables of the lc4 pages: what is sent by whom, and who holds what."""

from typing import Any

from xtrain.plan import collective_traffic

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY, Table
from .dataflow import rows_of
from .dataflow_drawing import local_shape

ALGORITHMS = {
    "all-reduce": "ring_all_reduce",
    "all-gather": "ring_all_gather",
    "reduce-scatter": "ring_reduce_scatter",
}
COST = {
    "all-reduce": r"$2\frac{N-1}{N}M$",
    "all-gather": r"$\frac{N-1}{N}M$",
    "reduce-scatter": r"$\frac{N-1}{N}M$",
    "": "0",
}
SYMBOLS = {"identity_all_reduce": " (f)", "all_reduce_identity": " (g)"}


def agreed(found: list[Any], what: str) -> Any:
    """What all ranks found; EvidenceError if they differ."""
    if any(one != found[0] for one in found):
        raise EvidenceError(f"{what}: the ranks differ")
    return found[0]


def elements_sent(kind: str, numel: int, ranks: int) -> int:
    """Elements a rank sends for a collective of so many whole elements."""
    return collective_traffic(ALGORITHMS[kind], numel, ranks).max_sent


# ------------------------------------------------------- differentiable collectives


def operator(name: str, ranks: int) -> dict[str, Any]:
    """One of them as it ran; EvidenceError if it sent other bytes than its formula."""
    from .runs import operators as run

    found = agreed(runs.remembered(run, ranks), name)[name]
    for way, sent in zip(("forward", "backward"), found["sent"], strict=True):
        if found[way] in ([], ["all-reduce"]):  # whose bytes only the backend knows
            continue
        (kind,) = found[way]
        formula = elements_sent(kind, found["bytes"], ranks)
        if sent != formula:
            raise EvidenceError(f"{name} {way}: sent {sent} bytes, formula {formula}")
    return found


@REGISTRY
def operators(ranks: int = 4) -> Table:
    """Each differentiable collective: its states and what runs, found by a run."""
    from .runs import OPERATORS

    rows = []
    for name in OPERATORS:
        found = operator(name, ranks)
        states, sides = [state.split()[0] for state in OPERATORS[name]], []
        for at, way in ((0, "forward"), (2, "backward")):
            kind = "".join(found[way])
            sides += [" → ".join(states[at : at + 2]),
                      f"{kind or 'nothing'}, {COST[kind]}"]  # fmt: skip
        rows.append([f"`{name}`{SYMBOLS.get(name, '')}", *sides])
    header = ["function", "value", "forward sends", "gradient", "backward sends"]
    return Table(header, rows)


@REGISTRY
def duals(ranks: int = 4) -> Table:
    """Pairs of which each one's backward is the other one's forward."""
    from .runs import OPERATORS

    found = {name: operator(name, ranks) for name in OPERATORS}
    rows = []
    for name, one in found.items():
        (dual,) = (
            other
            for other, two in found.items()
            if OPERATORS[other] == OPERATORS[name][2:] + OPERATORS[name][:2]
            and two["forward"] == one["backward"]
        )
        rows.append([f"`{name}`", f"`{dual}`"])
    return Table(["function", "its dual"], rows)


# --------------------------------------------------------------- calls of a module


def shown_calls(calls: list[list[Any]], names: dict[int, str]) -> str:
    """Collectives in words: "all-reduce of x"."""
    if not calls:
        return "nothing"
    return ", ".join(f"{kind} of {names[numel]}" for kind, numel in calls)


def sent_by(calls: list[list[Any]], ranks: int) -> int:
    """Elements a rank sends for some collectives."""
    return sum(elements_sent(kind, numel, ranks) for kind, numel in calls)


@REGISTRY
def linear_calls(ranks: int = 4) -> Table:
    """The collectives of a linear layer in each of its modes, recorded."""
    from .runs_calls import BATCH, HIDDEN, LAYERS, SEQUENCE, calls_of_layer

    tokens = BATCH * SEQUENCE
    rows = []
    for mode in LAYERS:
        found = agreed(runs.remembered(calls_of_layer, ranks, mode, True), mode)
        wide, thin = ("K", "O") if mode.startswith("row") else ("O", "K")
        names = {tokens * HIDDEN: f"$T{thin}$", tokens * 2 * HIDDEN: f"$T{wide}$",
                 HIDDEN: "$O$"}  # fmt: skip
        ways = [found["forward"], found["backward"]]
        rows.append([mode, *(shown_calls(way, names) for way in ways),
                     *(count(sent_by(way, ranks)) for way in ways)])  # fmt: skip
    header = ["mode", "forward", "backward", "sent forward", "sent backward"]
    return Table(header, rows, "lllrr")


# ---------------------------------------------------------------- who holds what

KINDS = {
    "embedding": ("embed_tokens",),
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "SwiGLU": ("gate_proj", "up_proj", "down_proj"),
    "norms": ("norms",),
    "head": ("lm_head",),
}


@REGISTRY
def parameters_by_rank(ranks: int = 4) -> Table:
    """Elements of a model's parameters, whole and on one rank."""
    from .runs import parameters_held

    found = agreed(runs.remembered(parameters_held, ranks), "parameters")
    rows, together = [], [0, 0]
    for kind, layers in KINDS.items():
        full, held = (sum(found[layer][i] for layer in layers) for i in (0, 1))
        if full not in (held, held * ranks):
            raise EvidenceError(f"{kind}: {held} of {full} on one of {ranks} ranks")
        words = "whole on every rank" if full == held else f"one of {ranks} slices"
        rows.append([kind, count(full), count(held), words])
        together = [together[0] + full, together[1] + held]
    share = f"{together[1] / together[0]:.2%}".replace("%", " %")
    rows.append(["**together**", *map(count, together), share])
    return Table(["", "in the model", "on one rank", ""], rows, "lrrl")


@REGISTRY
def activations_by_rank(ranks: int = 2) -> Table:
    """What a rank holds of each activation of a decoder layer, by `dataflow`."""
    columns: list[dict[str, str]] = []
    for name in ("decoder_layer", "decoder_layer_sequence_parallel"):
        held: dict[str, str] = {}
        for row in rows_of(name, ranks):
            if row.kind == "tensor" and row.forward != "partial":
                shape = local_shape(row.letters, row.forward, ranks)
                held.setdefault(row.name, f"{row.forward.split()[0]} {shape}")
        columns.append(held)
    rows = [[name, *(column[name] for column in columns)] for name in columns[0]]
    return Table(["", "tensor parallel", "and sequence parallel"], rows)
