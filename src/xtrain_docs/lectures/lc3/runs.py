"""Functions that run on every rank for the tables and figures of lc3."""

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from xtrain.comm import CommLedger

from .runs_training import Training


def bytes_held(stage: str, bf16: bool) -> dict[str, int]:
    """Bytes this rank holds when the second step's backward has ended."""
    training = Training(stage, bf16=bf16)
    training.step()
    training.backward()
    parameters = list(training.model.parameters())
    masters = [m for group in training.inner.param_groups for m in group["params"]]
    mine = {id(p) for p in parameters}
    shards = {b.shard.data_ptr() for b in training.sharded}
    copies = [m for m in masters if id(m) not in mine and m.data_ptr() not in shards]
    states = [t for state in training.inner.state.values() for t in state.values()]
    grads = [p.grad for p in (*parameters, *masters) if p.grad is not None]
    grads += [b.full_grad for b in training.sharded if b.full_grad is not None]
    return {
        "weights": nbytes(parameters),
        "gradients": nbytes({id(g): g for g in grads}.values()),
        "optimizer": nbytes(copies) + nbytes(t for t in states if t.dim() > 0),
    }


def nbytes(tensors: Any) -> int:
    """Bytes of the elements of some tensors."""
    return sum(t.nbytes for t in tensors)


def traffic(stage: str, collectives: str, width: int) -> dict[str, Any]:
    """Payload and wire bytes of one float32 training step, connections warm."""
    training = Training(stage, collectives, width=width)
    training.step()
    dist.barrier()
    time.sleep(0.05)  # let the last bytes of the barrier leave
    with CommLedger() as ledger:
        training.step()
        time.sleep(0.05)  # gloo's thread may still be sending for this rank
    calls: dict[str, int] = {}
    for event in ledger.events:
        if event.kind == "collective":
            calls[event.op] = calls.get(event.op, 0) + 1
    return {"sent": ledger.bytes_sent, "wire": ledger.wire_bytes, "calls": calls}


def gradients_alive(stage: str, cap_kib: float) -> list[int]:
    """Bytes of whole gradients after each layer's backward."""
    training = Training(stage, cap_kib=cap_kib)
    seen: list[int] = []
    parameters = list(training.model.parameters())

    def look(_: Tensor) -> None:
        grads = [p.grad for p in parameters if p.grad is not None]
        grads += [b.full_grad for b in training.sharded if b.full_grad is not None]
        seen.append(nbytes(grads))

    for layer in training.model.layers:  # its first norm is the last in backward
        weight = layer.input_layernorm.weight
        weight.register_post_accumulate_grad_hook(look)
    training.backward()
    return seen


def weights_alive(stage: str) -> list[int]:
    """Bytes of gathered weights at each layer's forward, then at each one's backward.

    The second step: the first forward learns the order that the prefetch follows.
    """
    training = Training(stage)
    seen: list[int] = []

    def look(*_: Any) -> None:
        shards = [s for u in training.model.units for s in u.flat_groups]
        seen.append(sum(s.full.untyped_storage().nbytes() for s in shards))

    for layer in training.model.module.layers:
        inner = layer.forward
        layer.forward = watched(inner, look)
    for _ in range(2):
        seen.clear()
        training.backward()
    return seen


def watched(
    forward: Callable[..., Tensor], look: Callable[..., None]
) -> Callable[..., Tensor]:
    """A layer's forward that looks when it begins, and again in its backward."""

    def call(*inputs: Tensor) -> Tensor:
        look()
        y = forward(*inputs)
        return Looking.apply(y, look)

    return call


class Looking(torch.autograd.Function):
    """Changes nothing; looks when the gradient comes by, after earlier hooks."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, look: Callable[..., None]) -> Tensor:
        ctx.look = look
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look()
        return gradient, None
