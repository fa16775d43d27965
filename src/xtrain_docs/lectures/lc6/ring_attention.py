"""Animations of ring attention: what the messages of real runs carried."""

from typing import Any

import torch

from xtrain.comm import CommLedger
from xtrain.comm.checks import rank_and_size
from xtrain.context_parallel import ring_attention

from ... import runs
from ...traces import REGISTRY, Trace


def messages() -> dict[str, Any]:
    """Of causal attention with one token a rank: the owner of each K and V that this
    rank sent, the ranks that had added to each dK and dV, and to those that came home.

    Queries are 0, so a query sees all its keys alike. The gradient of rank r's output
    is 2^r for each of them, so dV is the sum of 2^r over the ranks that have added.
    """
    rank, size = rank_and_size(None)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    q, k, v = (x.requires_grad_() for x in (one * 0, -one, one * rank))
    with CommLedger(values=True) as forward:
        out = ring_attention(q, k, v)
    with CommLedger(values=True) as backward:
        out.backward(one * 2**rank * (rank + 1))

    def sent(ledger: CommLedger) -> list[tuple[float, ...]]:
        return [e.values for e in ledger.events if e.kind == "send" and e.values]

    def added(dv: float) -> list[int]:
        return [rank for rank in range(size) if round(dv) >> rank & 1]

    assert v.grad is not None
    return {
        "keys": [round(v) for _, v in sent(forward)],
        "keys again": [round(v) for k, v in sent(backward) if k == -1],
        "gradients": [added(v) for k, v in sent(backward) if k != -1],
        "home": added(v.grad.item()),
    }


@REGISTRY
def ring_attention_keys(ranks: int = 4) -> Trace:
    """K and V of each rank on their way around; a rank holds those of one."""
    sent = [rank["keys"] for rank in runs.remembered(messages, ranks)]
    # A rank has in the end what the one before it sent last.
    held = [[[o] for o in (*own, sent[r - 1][-1])] for r, own in enumerate(sent)]
    return trace(
        "ring attention, forward", held, False,
        f"Cell i are the keys and values of rank i. The queries of all {ranks} ranks "
        "need all of them, one after another.",
    )  # fmt: skip


@REGISTRY
def ring_attention_gradients(ranks: int = 4) -> Trace:
    """dK and dV on their way; each rank whose queries saw the keys adds its part."""
    found = runs.remembered(messages, ranks)
    return trace(
        "ring attention, backward",
        [[*rank["gradients"], rank["home"]] for rank in found], True,
        "Cell i are the gradients of the keys and values of rank i. Each rank has "
        "computed its own part of its own.",
    )  # fmt: skip


def trace(
    title: str, held: list[list[list[int]]], additive: bool, opening: str
) -> Trace:
    """Of tensors that each rank holds one at a time, and passes on.

    Args:
        held: `[rank][step]`, the ranks that are in what it holds. The first of them is
            the owner: its own query sees a key, and under a causal mask no earlier one.
    """
    ranks = len(held)

    def state(step: int) -> list[list[list[int]]]:
        return [
            [row[step] if row[step][0] == cell else [] for cell in range(ranks)]
            for row in held
        ]

    steps = []
    for step in range(len(held[0]) - 1):
        hops = []
        for src, row in enumerate(held):
            dst = (src + 1) % ranks
            hops.append({
                "src": src, "dst": dst, "cells": row[step][:1], "content": [row[step]],
                "op": "copy" if held[dst][step + 1] == row[step] else "add",
            })  # fmt: skip
        steps.append({"messages": hops, "state": state(step + 1)})
    return Trace({
        "title": title, "kind": "all_reduce" if additive else "all_gather",
        "ranks": ranks, "cells": ranks, "root": 0, "additive": additive,
        "opening": opening, "initial": state(0), "steps": steps,
    })  # fmt: skip
