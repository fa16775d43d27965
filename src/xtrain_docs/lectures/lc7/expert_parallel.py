"""Expert ranks: copies travel to their experts, and the outputs travel back."""

from typing import Any

import torch

from xtrain.comm import CommLedger
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import DIRECT
from xtrain.expert_parallel import Routing, combine, dispatch, plan_dispatch

from ... import runs
from ...traces import REGISTRY, Trace

# The experts of eight tokens, two on each of four ranks; rank r has expert r.
CHOICES = ((1, 2), (0, 2), (2, 3), (0, 1), (2, 0), (1, 2), (3, 2), (1, 0))
RANKS, TOKENS = 4, len(CHOICES)


def messages() -> dict[str, Any]:
    """To whom this rank sent which tokens, in both all-to-alls.

    Token t is the number t + 1, and experts return what they get: so every message
    tells whose rows it carries.
    """
    rank, _ = rank_and_size(None)
    mine = slice(2 * rank, 2 * rank + 2)
    experts_Tk = torch.tensor(CHOICES[mine])
    gates_Tk = torch.ones(experts_Tk.shape, dtype=torch.float64)
    zeros_TE = torch.zeros(2, RANKS, dtype=torch.float64)
    routing = Routing(experts_Tk, gates_Tk, zeros_TE, zeros_TE, gates_Tk > 0)
    plan = plan_dispatch(routing, collectives=DIRECT)
    x_TH = 1.0 + torch.arange(TOKENS, dtype=torch.float64)[mine, None]
    with CommLedger(values=True) as there:
        rows_NH = dispatch(x_TH, plan)
    with CommLedger(values=True) as back:
        combine(rows_NH, gates_Tk, plan)
    return {
        "rows": [round(value) - 1 for value in rows_NH.flatten().tolist()],
        "dispatch": carried(there),
        "combine": carried(back),
    }


def carried(ledger: CommLedger) -> list[list[Any]]:
    """[to, tokens] of this rank's messages that are not empty."""
    return [
        [event.peer, [round(value) - 1 for value in event.values]]
        for event in ledger.events
        if event.kind == "send" and event.values
    ]


@REGISTRY
def expert_dispatch() -> Trace:
    """Copies of eight tokens on their way to the ranks of their experts."""
    found = runs.remembered(messages, RANKS)
    return one_step(
        "a dispatch", found, "dispatch", lambda rank, token: [token // 2],
        before=lambda rank, token: [rank] if token // 2 == rank else [],
        after=lambda rank, token: (
            [token // 2] if token in found[rank]["rows"] else []
        ),
        opening="Cell i is token i. Each rank has two tokens, and the expert of its "
        "number.",
    )  # fmt: skip


@REGISTRY
def expert_combine() -> Trace:
    """Outputs of the experts on their way back; a token's two are added up."""
    found = runs.remembered(messages, RANKS)
    return one_step(
        "a combine", found, "combine", lambda rank, token: [rank],
        before=lambda rank, token: [rank] if token in found[rank]["rows"] else [],
        after=lambda rank, token: (
            sorted(CHOICES[token]) if token // 2 == rank else []
        ),
        opening="Cell i is what an expert made of token i. Its colour is the expert's "
        "rank.",
    )  # fmt: skip


def one_step(
    title: str,
    found: list[dict[str, Any]],
    phase: str,
    content: Any,
    before: Any,
    after: Any,
    opening: str,
) -> Trace:
    """A trace of messages that all leave at once."""
    op = "add" if phase == "combine" else "copy"
    sent = [
        {"src": src, "dst": dst, "cells": tokens, "op": op,
         "content": [content(src, token) for token in tokens]}
        for src, one in enumerate(found) for dst, tokens in one[phase]
    ]  # fmt: skip
    states = [
        [[of(rank, token) for token in range(TOKENS)] for rank in range(RANKS)]
        for of in (before, after)
    ]
    return Trace({
        "title": title, "kind": "all_to_all", "ranks": RANKS, "cells": TOKENS,
        "root": 0, "additive": op == "add", "opening": opening, "initial": states[0],
        "steps": [{"messages": sent, "state": states[1]}],
    })  # fmt: skip
