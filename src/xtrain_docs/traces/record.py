"""Run a collective on real ranks and read its messages back.

Cell i of rank r starts as the integer 2**r + i * 2**16. A sum of such cells tells
which ranks are in it (low bits) and which cell it is (the rest, divided by how many),
so every recorded message can be decoded without knowing the algorithm.
"""

import importlib
from collections.abc import Sequence
from dataclasses import astuple
from functools import partial
from typing import Any

SHIFT = 16
ADDITIVE = ("all_reduce", "reduce", "reduce_scatter")
State = list[list[list[int]]]


class TraceError(ValueError):
    """A recorded run contradicts itself. Stops the build."""


def encode(rank: int, cell: int) -> int:
    """The telling number for a cell of a rank."""
    return (1 << rank) + (cell << SHIFT)


def decode(value: float) -> tuple[int, list[int]] | None:
    """Cell and contributing ranks of a number; None for an empty buffer's zero."""
    whole = int(value)
    mask = whole & ((1 << SHIFT) - 1)
    ranks = [r for r in range(SHIFT) if mask >> r & 1]
    if not ranks:
        return None
    cell, left = divmod(whole >> SHIFT, len(ranks))
    if left:
        raise TraceError(f"{value} mixes different cells")
    return cell, ranks


def on_rank(
    reference: str, kind: str, cells: int, root: int, extra: dict[str, Any]
) -> tuple[list, list[int], list[int] | None]:
    """What one rank does: events, cells before, cells after (None: scratch)."""
    import torch
    import torch.distributed as dist

    from xtrain.comm.collective_kinds import prepare
    from xtrain.comm.ledger import CommLedger

    module, _, name = reference.partition(":")
    function = partial(getattr(importlib.import_module(module), name), **extra)
    rank = dist.get_rank()
    whole = torch.tensor([encode(rank, i) for i in range(cells)], dtype=torch.int64)
    call = prepare(kind, function, whole, root)
    before = call.given.tolist()
    if kind in ("all_gather", "gather"):  # one cell, at its place among all
        before = [before[0] if i == rank else 0 for i in range(cells)]
    with CommLedger(values=True) as ledger:
        call.run()
    scratch = rank != root and kind in ("reduce", "gather")
    return (
        [astuple(event) for event in ledger.events],
        before,
        None if scratch else call.result.tolist(),
    )


def replayed(kind: str, ranks: int, cells: int, seen: list[list]) -> dict[str, Any]:
    """The trace of what every rank has seen in `on_rank`.

    Raises:
        TraceError: a message holds what its sender did not have, or the final
            buffers are not what the messages add up to.
    """
    from xtrain.comm.events import Event
    from xtrain.comm.message_rounds import message_rounds

    events, befores, afters = zip(*seen, strict=True)
    rounds = message_rounds([[Event(*event) for event in one] for one in events])
    messages = [[(m.src, m.dst, m.values) for m in one] for one in rounds]
    return replay(kind, ranks, cells, messages, befores, afters)


def replay(
    kind: str,
    ranks: int,
    cells: int,
    rounds: list[list[tuple[int, int, Any]]],
    befores: Sequence[list[int]],
    afters: Sequence[list[int] | None],
) -> dict[str, Any]:
    """Turn decoded messages into states, checking them against each other."""
    state: State = [[[] for _ in range(cells)] for _ in range(ranks)]
    for rank, before in enumerate(befores):
        for place, value in enumerate(before):
            if found := decode(value):
                state[rank][place] = found[1]
    initial = _copy(state)
    steps = []
    for one in rounds:
        new = _copy(state)
        messages = []
        for src, dst, values in one:
            message = _message(kind, src, dst, values)
            for place, content in zip(
                message.pop("places"), message["content"], strict=True
            ):
                held = content if kind == "all_to_all" else state[src][place]
                if held != content:
                    raise TraceError(
                        f"rank {src} sends {content} in cell {place}, but holds {held}"
                    )
                old = new[dst][place]
                if kind in ADDITIVE and old and not set(old) <= set(content):
                    message["op"] = "add"
                if kind == "all_to_all":
                    new[dst][place] = content
                else:
                    new[dst][place] = sorted({*old, *content})
            messages.append(message)
        state = new
        steps.append({"messages": messages, "state": state})
    _check_end(kind, state, afters)
    return {"initial": initial, "steps": steps}


def _message(kind: str, src: int, dst: int, values: Any) -> dict[str, Any]:
    if values is None:
        raise TraceError("a message without recorded values")
    if kind == "barrier":
        return {"src": src, "dst": dst, "cells": [], "places": [], "content": [],
                "op": "signal"}  # fmt: skip
    found = [d for d in map(decode, values) if d]
    cells = [cell for cell, _ in found]
    places = [src for _ in found] if kind == "all_to_all" else cells
    content = [ranks for _, ranks in found]
    op = "copy" if found else "signal"
    return {"src": src, "dst": dst, "cells": cells, "places": places,
            "content": content, "op": op}  # fmt: skip


def _check_end(kind: str, state: State, afters: Sequence[list[int] | None]) -> None:
    for rank, after in enumerate(afters):
        for place, value in enumerate(after or []):
            found = decode(value)
            cell, content = found if found else (place, [])
            if kind == "all_to_all":
                cell = place
            if state[rank][cell] != content:
                raise TraceError(
                    f"rank {rank} ends with {content} in cell {cell}, "
                    f"but the messages make {state[rank][cell]}"
                )


def _copy(state: State) -> State:
    return [[list(content) for content in row] for row in state]
