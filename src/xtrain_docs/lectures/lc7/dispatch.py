"""Animations of the page on expert ranks: copies travel there, and outputs back."""

from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...traces import REGISTRY, Trace

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


@REGISTRY
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
        "a dispatch", sent, own, after, lambda rank, token: [token // 2], False,
        "Cell i is token i. Each rank has two tokens, and the expert of its number.",
    )  # fmt: skip


@REGISTRY
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
        "a combine", sent, before, after, lambda rank, token: [rank], True,
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
