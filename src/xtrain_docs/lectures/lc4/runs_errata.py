"""Functions that run on every rank for the errata and the questions of lc4."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from xtrain.comm import CommLedger, autograd
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import Collectives, collectives_named
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.tensor_parallel import (
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
    functions,
)
from xtrain.testing.saved import SavedTensors

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


def calls_of_layer(name: str) -> dict[str, list[list[Any]]]:
    """The collectives of a layer's forward and of its backward, in order."""
    size = rank_and_size(None)[1]
    kind, options = LAYERS[name]
    inner = 2 * HIDDEN
    sizes = (HIDDEN, inner) if kind is ColumnParallelLinear else (inner, HIDDEN)
    layer = kind(*sizes, bias=False, **options)
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


def mlp_of(name: str) -> nn.Module:
    """HIDDEN to four times that and back, of column layers alone or column and row.

    The weights are the same: each layer keeps its slice of the one that is drawn.
    """
    torch.manual_seed(0)
    inner = 4 * HIDDEN
    gather = name == MLPS[0]
    up = ColumnParallelLinear(HIDDEN, inner, bias=False, gather_output=gather)
    if gather:
        down: nn.Module = ColumnParallelLinear(
            inner, HIDDEN, bias=False, gather_output=True
        )
    else:
        down = RowParallelLinear(inner, HIDDEN, bias=False)
    return nn.Sequential(up, nn.GELU(), down)


MLPS = ("all-gather only", "column, then row")


def bytes_of_mlp(name: str) -> tuple[int, int, list[float]]:
    """Bytes sent over our ring, forward and backward; and the output's first row."""
    mlp = mlp_of(name)
    x = torch.randn(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    with collectives_of("ring"):
        with CommLedger() as forward:
            y = mlp(x)
        with CommLedger() as backward:
            y.sum().backward()
    return forward.bytes_sent, backward.bytes_sent, y[0, 0].tolist()


def model_of(layers: int, sequence_parallel: bool = False) -> XtrainModel:
    """A decoder cut over all ranks, of sizes that divide by up to 4 of them."""
    size = rank_and_size(None)[1]
    config = XtrainConfig(
        vocab_size=24,
        hidden_size=HIDDEN,
        intermediate_size=2 * HIDDEN,
        num_hidden_layers=layers,
        num_attention_heads=12,
    )
    mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
    return XtrainModel(config, mesh, sequence_parallel=sequence_parallel)


def recomputed(forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A layer's forward that keeps its input only, and runs again in backward."""

    def call(*inputs: Tensor) -> Tensor:
        from torch.utils.checkpoint import checkpoint

        y: Tensor = checkpoint(forward, *inputs, use_reentrant=False)
        return y

    return call


def traffic_of_model(
    layers: int, sequence_parallel: bool, recompute: bool, collectives: str
) -> dict[str, Any]:
    """Calls and bytes of one step's forward and backward."""
    model = model_of(layers, sequence_parallel)
    if recompute:
        for layer in model.layers:
            layer.forward = recomputed(layer.forward)
    tokens = torch.arange(SEQUENCE).view(BATCH, SEQUENCE)
    with collectives_of(collectives):
        with CommLedger() as forward:
            loss = model(tokens, tokens)
        with CommLedger() as backward:
            loss.backward()
    found: dict[str, Any] = {"sent": [forward.bytes_sent, backward.bytes_sent]}
    if collectives == "torch":
        found["calls"] = [calls(forward), calls(backward)]
    return found


def calls_around_attention() -> dict[str, Any]:
    """Collectives before the heads attend, and after; and where the sum stands."""
    seen: list[int] = []
    size = rank_and_size(None)[1]

    def attend(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        seen.append(len(ledger.events))
        y = F.scaled_dot_product_attention(q, k, v, **options)
        seen.append(len(ledger.events))
        seen.append(q.shape[1])
        return y

    block = ParallelAttention(HIDDEN, 12, 12, 2, attention=attend)
    partial: list[int] = []
    block.o_proj.register_forward_pre_hook(
        lambda *_: partial.append(len(ledger.events))
    )
    x = torch.ones(BATCH, SEQUENCE, HIDDEN, requires_grad=True)
    with collectives_of("torch"):
        with CommLedger() as ledger:
            y = block(x)
        with CommLedger() as backward:
            y.sum().backward()
    return {
        "forward": calls(ledger),
        "backward": calls(backward),
        "before and after the heads": seen[:2],
        "before o_proj": partial[0],
        "heads here": seen[2],
        "ranks": size,
    }


def bytes_saved(sequence_parallel: bool) -> dict[str, int]:
    """Bytes that autograd keeps of one layer's forward, weights not counted."""
    model = model_of(1, sequence_parallel)
    layer, size = model.layers[0], rank_and_size(None)[1]
    tokens = SEQUENCE // size if sequence_parallel else SEQUENCE
    x = torch.randn(BATCH, tokens, HIDDEN, requires_grad=True)
    positions = torch.arange(SEQUENCE)
    found = {"layer": saved_by(lambda: layer(x, positions), layer)}
    found["norm"] = saved_by(lambda: layer.input_layernorm(x), layer)
    return found


def saved_by(run: Callable[[], Tensor], module: nn.Module) -> int:
    """Bytes of all storages that autograd saves while `run` goes forward."""
    with SavedTensors() as saved:
        result = run()
    del result
    return saved.nbytes(but=module.parameters())
