"""Animations, tables and the picture of the page on expert ranks."""

from typing import Any

from xtrain.plan import all_to_all_bytes, routed_bytes

from ... import runs
from ...evidence import EvidenceError, count
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...traces import REGISTRY as TRACES
from ...traces import Trace
from .balance import cell

RANKS = 4
PHASES = ("dispatch", "combine", "combine, backward", "dispatch, backward")
Sent = list[dict[str, list[int]]]


def told() -> list[dict[str, Any]]:
    """What each rank's messages carried; EvidenceError unless it is the routing's."""
    from .runs_dispatch import CHOICES, messages

    found = runs.remembered(messages, RANKS)
    for rank, one in enumerate(found):
        out: dict[str, list[int]] = {}
        for token in (2 * rank, 2 * rank + 1):
            for expert in CHOICES[token]:
                out.setdefault(str(expert), []).append(token)
        out.pop(str(rank), None)
        back = {}
        for owner in range(RANKS):
            tokens = [t for t in (2 * owner, 2 * owner + 1) if rank in CHOICES[t]]
            if tokens and owner != rank:
                back[str(owner)] = tokens
        for phase in PHASES:
            right = out if phase in ("dispatch", "combine, backward") else back
            if one[phase] != right:
                raise EvidenceError(f"rank {rank}, {phase}: {one[phase]}, not {right}")
        check_ends(rank, one)
    return found


def check_ends(rank: int, one: dict[str, Any]) -> None:
    """EvidenceError unless the expert's rows and the tokens' outputs are right."""
    from .runs_dispatch import CHOICES

    rows = [token for token, chosen in enumerate(CHOICES) if rank in chosen]
    if one["rows"] != rows:
        raise EvidenceError(f"expert {rank} has rows {one['rows']}, not {rows}")
    outputs = [2.0 * (token + 1) for token in (2 * rank, 2 * rank + 1)]
    if one["output"] != outputs:
        raise EvidenceError(f"rank {rank} ends with {one['output']}, not {outputs}")


@TRACES
def expert_dispatch() -> Trace:
    """Copies of eight tokens on their way to the ranks of their experts."""
    found = told()
    own: list[list[list[int]]] = [
        [[rank] if token // 2 == rank else [] for token in range(8)]
        for rank in range(RANKS)
    ]
    after = [
        [[token // 2] if token in one["rows"] else [] for token in range(8)]
        for one in found
    ]
    sent = [one["dispatch"] for one in found]
    return one_step(
        "dispatch", sent, own, after, lambda rank, token: [token // 2], False,
        "Cell i is token i. Each rank has two tokens, and the expert of its number.",
    )  # fmt: skip


@TRACES
def expert_combine() -> Trace:
    """Outputs of the experts on their way back; a token's two are added up."""
    from .runs_dispatch import CHOICES

    found = told()
    before = [
        [[rank] if token in one["rows"] else [] for token in range(8)]
        for rank, one in enumerate(found)
    ]
    after = [
        [sorted(CHOICES[token]) if token // 2 == rank else [] for token in range(8)]
        for rank in range(RANKS)
    ]
    sent = [one["combine"] for one in found]
    return one_step(
        "combine", sent, before, after, lambda rank, token: [rank], True,
        "Cell i is what an expert made of token i. Its colour is the expert's rank.",
    )  # fmt: skip


def one_step(
    title: str, sent: Sent, before: Any, after: Any, content: Any, additive: bool,
    opening: str,
) -> Trace:  # fmt: skip
    """A trace of messages that all leave at once."""
    messages = [
        {"src": src, "dst": int(dst), "cells": tokens,
         "content": [content(src, token) for token in tokens],
         "op": "add" if additive else "copy"}
        for src, one in enumerate(sent)
        for dst, tokens in one.items()
    ]  # fmt: skip
    return Trace({
        "title": title, "kind": "all_to_all", "ranks": RANKS, "cells": 8, "root": 0,
        "additive": additive, "opening": opening, "initial": before,
        "steps": [{"messages": messages, "state": after}],
    })  # fmt: skip


# ------------------------------------------------------------------------- bytes


def counted(ranks: int, uniform: bool) -> list[dict[str, Any]]:
    """Bytes of each rank and phase; EvidenceError unless the routing's, exactly."""
    from .runs_dispatch import HIDDEN, ITEMSIZE, bytes_of_layer

    found = runs.remembered(bytes_of_layer, ranks, uniform)
    copies = [one["copies"] for one in found]
    out = routed_bytes(copies, HIDDEN, itemsize=ITEMSIZE)
    transposed = [list(column) for column in zip(*copies, strict=True)]
    back = routed_bytes(transposed, HIDDEN, itemsize=ITEMSIZE)
    for rank, one in enumerate(found):
        right = dict(zip(PHASES, (out[rank], back[rank], out[rank], back[rank]),
                         strict=True))  # fmt: skip
        said = {phase: one[phase] for phase in PHASES}
        if said != right:
            raise EvidenceError(f"rank {rank} of {ranks}: {said}, formula {right}")
    return found


@TABLES
def expert_bytes(ranks: int = 4) -> Table:
    """Bytes that each rank sends in the four all-to-alls of a layer, counted."""
    rows = []
    for rank, one in enumerate(counted(ranks, False)):
        rows.append([str(rank), ", ".join(map(str, one["copies"])),
                     *(count(one[phase]) for phase in PHASES),
                     count(one["counts"])])  # fmt: skip
    header = ["rank", "copies for each rank", *PHASES, "counts"]
    return Table(header, rows, "rlrrrrr")


@TABLES
def expert_bytes_uniform(sizes: tuple[int, ...] = (1, 2, 4, 8)) -> Table:
    """With uniform routing: bytes of a token in one all-to-all, beside the formula."""
    from .runs_dispatch import HIDDEN, ITEMSIZE, TOKENS, TOP_K

    rows = []
    for ranks in sizes:
        found = counted(ranks, True)
        formula = all_to_all_bytes(TOKENS, TOP_K, HIDDEN, ranks, itemsize=ITEMSIZE)
        if any(one[phase] != formula for one in found for phase in PHASES):
            raise EvidenceError(f"{ranks} ranks: {found}, not {formula}")
        rows.append([str(ranks), f"{formula / TOKENS:g}",
                     f"{found[0]['dispatch'] / TOKENS:g}",
                     f"{found[0]['combine'] / TOKENS:g}",
                     count(found[0]["counts"])])  # fmt: skip
    header = ["ranks", "formula", "dispatch", "combine", "counts, in all"]
    return Table(header, rows, "rrrrr")


# ---------------------------------------------------------- gradients and groups


@TABLES
def expert_gradient_scale(sizes: tuple[int, ...] = (2, 4)) -> Table:
    """Relative difference of gradients to one process, right and with two mistakes."""
    from .runs_dispatch import gradient_errors

    names = {
        "experts": "expert weights, as they are",
        "experts, averaged": "expert weights, divided by the ranks",
        "router": "router, as it is",
        "router, summed": "router, summed over the ranks",
    }
    rows = []
    for key, name in names.items():
        cells = []
        for ranks in sizes:
            worst = max(one[key] for one in runs.remembered(gradient_errors, ranks))
            right = key in ("experts", "router, summed")
            if (worst < 1e-12) != right:
                raise EvidenceError(f"{key}, {ranks} ranks: {worst}")
            cells.append("none" if right else f"{worst:.2g}")
        rows.append([name, *cells])
    return Table(["", *(f"{ranks} ranks" for ranks in sizes)], rows, "lrr")


WIDTH = 400


@FIGURES
def expert_groups(replicas: int = 2, ranks: int = 8) -> str:
    """The ranks of a mesh with both expert axes, each with the experts that it has."""
    from .runs_dispatch import groups

    found = runs.remembered(groups, ranks, replicas)
    check_groups(found, replicas, ranks)
    left, top, high = 92.0, 40.0, 62.0
    wide = (WIDTH - left - 4) / (ranks // replicas)
    parts = [text(left, 14, "expert: other experts, other tokens", "xt-label")]
    for one in found:
        data, expert = one["place"]
        x, y = left + wide * expert, top + high * data
        experts = ", ".join(map(str, one["experts"]))
        hover = f"rank {one['rank']}: experts {experts}"
        parts.append(cell(x, y, wide - 6, high - 8, 0.25, expert, hover))
        middle = x + (wide - 6) / 2
        parts.append(text(middle, y + 23, f"rank {one['rank']}", "xt-label", "middle"))
        parts.append(text(middle, y + 42, f"experts {experts}", "xt-label", "middle"))
    for data in range(replicas):
        y = top + high * data + 30
        parts.append(text(4, y, f"expert_data {data}", "xt-tick"))
    for expert in range(ranks // replicas):
        middle = left + wide * expert + (wide - 6) / 2
        parts.append(text(middle, 32, str(expert), "xt-tick", "middle"))
    y = top + high * replicas + 14
    parts.append(
        text(left, y, "one colour: the same experts, whose gradients", "xt-tick")
    )
    parts.append(text(left, y + 17, "are summed over expert_data", "xt-tick"))
    title = f"{ranks} ranks as {replicas} x {ranks // replicas}"
    words = "; ".join(f"rank {o['rank']}: experts {o['experts']}" for o in found)
    return fit(document(WIDTH, int(y + 26), parts, title, words), WIDTH)


def check_groups(found: list[dict[str, Any]], replicas: int, ranks: int) -> None:
    """EvidenceError unless each expert is once in a group, and alike in its copies."""
    from .runs_dispatch import EXPERTS

    for one in found:
        held = sorted(e for r in one["expert"] for e in found[r]["experts"])
        copies = {tuple(found[r]["experts"]) for r in one["expert_data"]}
        sizes = [len(one["expert"]), len(one["expert_data"])]
        if held != list(range(EXPERTS)) or len(copies) != 1:
            raise EvidenceError(f"rank {one['rank']}: {held}, {copies}")
        if sizes != [ranks // replicas, replicas]:
            raise EvidenceError(f"rank {one['rank']}: groups of {sizes}")
