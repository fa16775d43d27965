"""The animations and the table of the page on ring attention."""

from typing import Any

from xtrain.plan import context_bytes

from ... import runs
from ...evidence import EvidenceError, count
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...traces import REGISTRY as TRACES
from ...traces import Trace

State = list[list[list[int]]]
CASES = ((2, 4, 4, "float32"), (4, 4, 4, "float32"), (4, 4, 4, "bfloat16"),
         (4, 4, 1, "bfloat16"), (8, 4, 1, "bfloat16"))  # fmt: skip
TOKENS, HEAD_DIM = 16, 8


def told(ranks: int) -> list[dict[str, Any]]:
    """What each rank's messages carried."""
    from .runs_ring import messages

    return runs.remembered(messages, ranks)


@TRACES
def ring_attention_keys(ranks: int = 4) -> Trace:
    """K and V of each rank on their way around; a rank holds those of one."""
    sent = [rank["keys"] for rank in told(ranks)]
    held = [[*owners, (rank + 1) % ranks] for rank, owners in enumerate(sent)]
    check_visits(held)
    content = [[[owner] for owner in owners] for owners in held]
    return trace(
        "ring attention, forward", held, content, False,
        f"Cell i are the keys and values of rank i. The queries of all {ranks} ranks "
        "need all of them, one after another.",
    )  # fmt: skip


@TRACES
def ring_attention_gradients(ranks: int = 4) -> Trace:
    """dK and dV on their way; each rank whose queries saw the keys adds its part."""
    sent = [rank["gradients"] for rank in told(ranks)]
    content = [[*parts, told(ranks)[rank]["home"]] for rank, parts in enumerate(sent)]
    # A key's own query always sees it, and under a causal mask no earlier one does.
    held = [[min(parts) for parts in row] for row in content]
    check_visits([row[:-1] for row in held])
    if [row[-1] for row in content] != [list(range(r, ranks)) for r in range(ranks)]:
        raise EvidenceError(f"what came home is not everybody's: {content}")
    return trace(
        "ring attention, backward", held, content, True,
        "Cell i are the gradients of the keys and values of rank i. Each rank has "
        "computed its own part of its own.",
    )  # fmt: skip


def check_visits(held: list[list[int]]) -> None:
    """EvidenceError unless every rank has had everyone's, its own first, in order."""
    for rank, owners in enumerate(held):
        expected = [(rank - step) % len(held) for step in range(len(held))]
        if owners != expected:
            raise EvidenceError(
                f"rank {rank} has had those of {owners}, not {expected}"
            )


def trace(
    title: str, held: list[list[int]], content: list[list[list[int]]], additive: bool,
    opening: str,
) -> Trace:  # fmt: skip
    """Of tensors that each rank holds one at a time: whose, and what is in them."""
    ranks = len(held)

    def state(step: int) -> State:
        return [
            [content[r][step] if held[r][step] == cell else [] for cell in range(ranks)]
            for r in range(ranks)
        ]

    steps = []
    for step in range(len(held[0]) - 1):
        messages = []
        for src in range(ranks):
            dst = (src + 1) % ranks
            cell, parts = held[src][step], content[src][step]
            if held[dst][step + 1] != cell or not set(parts) <= set(
                content[dst][step + 1]
            ):
                raise EvidenceError(f"rank {dst} does not go on with what {src} sent")
            adds = content[dst][step + 1] != parts
            messages.append({
                "src": src, "dst": dst, "cells": [cell], "content": [parts],
                "op": "add" if adds else "copy",
            })  # fmt: skip
        steps.append({"messages": messages, "state": state(step + 1)})
    return Trace({
        "title": title, "kind": "all_reduce" if additive else "all_gather",
        "ranks": ranks, "cells": ranks, "root": 0, "additive": additive,
        "opening": opening, "initial": state(0), "steps": steps,
    })  # fmt: skip


@TABLES
def ring_attention_bytes() -> Table:
    """Bytes of one rank, counted, beside the formula; equal on all ranks."""
    from .runs_ring import bytes_sent

    rows = []
    for ranks, heads, key_heads, dtype in CASES:
        formula = context_bytes(
            "ring", TOKENS, heads, key_heads, HEAD_DIM, ranks,
            itemsize=2 if dtype == "bfloat16" else 4,
        )  # fmt: skip
        counted = runs.remembered(bytes_sent, ranks, heads, key_heads, TOKENS, dtype)
        if any(tuple(found) != formula for found in counted):
            raise EvidenceError(f"{ranks} ranks, {dtype}: {counted}, not {formula}")
        rows.append([
            str(ranks), f"{heads} / {key_heads}", dtype,
            *(f"{count(n)}" for pair in zip(formula, counted[0], strict=True)
              for n in pair),
        ])  # fmt: skip
    header = ["ranks", "heads / key heads", "dtype", "forward, formula", "counted",
              "backward, formula", "counted"]  # fmt: skip
    return Table(header, rows, "rrlrrrr")
