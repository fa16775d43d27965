"""The collectives that linear layers call, recorded on every rank."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from xtrain.comm import CommLedger, autograd
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives, collectives_named
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    functions,
)

BATCH, SEQUENCE, HIDDEN = 1, 12, 24
NAMES = {
    "allreduce": "all-reduce",
    "all_reduce": "all-reduce",
    "allgather": "all-gather",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


@contextmanager
def collectives_of(name: str) -> Iterator[Collectives]:
    """Let the layers use these collectives: "torch" has calls, "ring" exact bytes."""
    chosen = collectives_named(name)
    modules: tuple[Any, ...] = (autograd, functions)
    before = [module.TORCH for module in modules], autograd.default_collectives
    for module in modules:
        module.TORCH = chosen
    autograd.default_collectives = lambda group, device: chosen
    try:
        yield chosen
    finally:
        autograd.default_collectives = before[1]
        for module, value in zip(modules, before[0], strict=True):
            module.TORCH = value


def calls(ledger: CommLedger) -> list[list[Any]]:
    """Name and elements of the whole tensor of each collective; float32 tensors."""
    size = rank_and_size(None)[1]
    found = []
    for event in ledger.events:
        op = event.op.strip("_")
        name = next(name for start, name in NAMES.items() if op.startswith(start))
        elements = event.payload // 4
        found.append([name, elements * size if name == "reduce-scatter" else elements])
    return found


LAYERS: dict[str, tuple[type[nn.Module], dict[str, bool]]] = {
    "column": (ColumnParallelLinear, {}),
    "column, gathered": (ColumnParallelLinear, {"gather_output": True}),
    "row": (RowParallelLinear, {}),
    "row, splitting": (RowParallelLinear, {"split_input": True}),
    "column, sequence": (ColumnParallelLinear, {"sequence_parallel": True}),
    "row, sequence": (RowParallelLinear, {"sequence_parallel": True}),
}
"""Column: HIDDEN to 2 HIDDEN features. Row: back again."""


def calls_of_layer(name: str, bias: bool = False) -> dict[str, list[list[Any]]]:
    """The collectives of a layer's forward and of its backward, in order."""
    size = rank_and_size(None)[1]
    kind, options = LAYERS[name]
    inner = 2 * HIDDEN
    sizes = (HIDDEN, inner) if kind is ColumnParallelLinear else (inner, HIDDEN)
    layer = kind(*sizes, bias=bias, **options)
    split = "sequence" in name and kind is ColumnParallelLinear
    tokens = SEQUENCE // size if split else SEQUENCE
    whole = kind is ColumnParallelLinear or "split_input" in options
    features = sizes[0] if whole else sizes[0] // size
    x = torch.ones(BATCH, tokens, features, requires_grad=True)
    with collectives_of("torch"):
        with CommLedger() as forward:
            y = layer(x)
        with CommLedger() as backward:
            y.sum().backward()
    return {"forward": calls(forward), "backward": calls(backward)}
