"""Small cut models and layers whose calls, bytes and memory the tests count."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.tensor_parallel.calls import (
    BATCH,
    HIDDEN,
    SEQUENCE,
    calls,
    collectives_of,
)
from xtrain.comm import CommLedger
from xtrain.comm.checks import rank_and_size
from xtrain.comm.collective_choice import RING
from xtrain.model import XtrainConfig, XtrainModel
from xtrain.tensor_parallel import (
    AllGatherMLP,
    ColumnParallelLinear,
    ParallelAttention,
    RowParallelLinear,
)
from xtrain.testing.saved import SavedTensors
from xtrain.zero import FullyShardedDataParallel

MLPS = ("all-gather only", "column, then row")


def bytes_of_mlp(name: str) -> tuple[int, int, list[float]]:
    """Bytes sent over our ring, forward and backward; and the output's first row.

    HIDDEN to four times that and back. Both MLPs keep slices of the same weights.
    """
    torch.manual_seed(0)
    inner = 4 * HIDDEN
    if name == MLPS[0]:
        mlp: nn.Module = AllGatherMLP(HIDDEN, inner, bias=False)
    else:
        column = ColumnParallelLinear(HIDDEN, inner, bias=False)
        mlp = nn.Sequential(
            column, nn.GELU(), RowParallelLinear(inner, HIDDEN, bias=False)
        )
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


def small_config(width: int) -> XtrainConfig:
    """Two layers of sizes that divide by up to 4 ranks."""
    return XtrainConfig(
        vocab_size=8,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=2,
        num_attention_heads=4,
    )


def bytes_of_step(kind: str, width: int, sequence: int) -> int:
    """Bytes that this rank sends in forward and backward, over our ring.

    Args:
        kind: "tensor parallelism" or "ZeRO-3".
    """
    size = rank_and_size(None)[1]
    model: Any
    if kind == "ZeRO-3":
        model = FullyShardedDataParallel(
            XtrainModel(small_config(width)), collectives=RING
        )
    else:
        mesh = init_device_mesh("cpu", (size,), mesh_dim_names=("tensor",))
        model = XtrainModel(small_config(width), mesh)
    tokens = torch.arange(sequence).view(1, sequence) % 8
    with collectives_of("ring"), CommLedger() as ledger:
        model(tokens, tokens).backward()
    # The sums of the loss are torch's own calls, whose bytes not every backend tells.
    return sum(e.nbytes or 0 for e in ledger.events if e.kind == "send")
