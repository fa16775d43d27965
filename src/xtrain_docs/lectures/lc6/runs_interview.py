"""Functions that run on every rank for the questions of lc6."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from xtrain.comm import CommLedger, init_mesh
from xtrain.comm.checks import rank_and_size
from xtrain.context_parallel import (
    ring_attention,
    shard_sequence,
    unshard_sequence,
)
from xtrain.context_parallel.block_attention import TILES, BlockAttention
from xtrain.context_parallel.ring_attention import Ring
from xtrain.model import XtrainConfig, XtrainModel

from .runs_compare import inputs

# ------------------------------------------------------- messages and blocks in order


class Order:
    """Writes down in which order a rank posts messages and computes blocks."""

    def __init__(self) -> None:
        self.posted: list[int] = []
        self.ledger = CommLedger()

    def blocks(self) -> BlockAttention:
        """`TILES` that note how many messages have been posted before each block."""
        return BlockAttention(self.noted(TILES.forward), self.noted(TILES.backward))

    def noted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self.posted.append(self.ledger.messages)
            return function(*args)

        return call

    def of(self, run: Callable[[], Any]) -> tuple[Any, list[int]]:
        """What a run gives, and the messages before each block and in the end."""
        self.posted, self.ledger = [], CommLedger()
        with self.ledger:
            result = run()
        return result, [*self.posted, self.ledger.messages]


def posted_before_blocks(local: int) -> list[list[int]]:
    """Of full attention: forward, and backward."""
    size = rank_and_size(None)[1]
    q, k, v, grad = (shard_sequence(t, 2) for t in inputs(2, 2, local * size))
    for tensor in (q, k, v):
        tensor.requires_grad_()
    order = Order()
    blocks = order.blocks()
    out, forward = order.of(
        lambda: ring_attention(q, k, v, False, block_attention=blocks)
    )
    _, backward = order.of(lambda: out.backward(grad))
    return [forward, backward]


def computed_before_arrival(local: int) -> int:
    """Rank 0 sends its keys only after rank 1 says that it is computing.

    A rank that waits for keys before it computes would wait forever.

    Returns:
        Blocks that this rank had begun when the first message from rank 0 left.
    """
    rank, size = rank_and_size(None)
    aside = dist.new_group()
    begun = torch.zeros(1)

    def forward(*args: Any) -> Any:
        begun.add_(1)
        if rank == 1 and begun == 1:
            dist.send(begun, 0, group=aside)
        return TILES.forward(*args)

    def hook(ring: Any, x: Tensor) -> Any:
        if rank == 0 and not said:
            said.append(torch.zeros(1))
            dist.recv(said[0], 1, group=aside)
        return rotate(ring, x)

    said: list[Tensor] = []
    rotate, Ring.rotate = Ring.rotate, hook  # type: ignore[method-assign]
    try:
        q, k, v, _ = (shard_sequence(t, 2) for t in inputs(2, 2, local * size))
        blocks = BlockAttention(forward, TILES.backward)
        ring_attention(q, k, v, False, block_attention=blocks)
    finally:
        Ring.rotate = rotate  # type: ignore[method-assign]
        dist.destroy_process_group(aside)
    return int(said[0]) if rank == 0 else 1


# ----------------------------------------------------- a model, and one mistake in it

CONFIG = XtrainConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=12,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    initializer_range=0.5,  # as if trained: attention matters
)


def batch(tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; most labels of the first half do not count."""
    generator = torch.Generator().manual_seed(6)
    shape = (2, 2, tokens)
    drawn, labels = torch.randint(CONFIG.vocab_size, shape, generator=generator)
    labels[:, : tokens // 2 - 1] = -100
    return drawn, labels


def one_process(tokens: int) -> list[Tensor]:
    """Loss and gradients with the whole sequence."""
    model = XtrainModel(CONFIG, dtype=torch.float64)
    loss = model.loss(*batch(tokens))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


CHANGES = (
    "no mistake",
    "each rank divides by its own count",
    "gradients are averaged",
    "gradients are not summed",
    "positions count from 0 on each rank",
)


def error_of_model(change: str, tokens: int, balance: str = "none") -> list[float]:
    """Relative errors of the loss, and of the gradient that is off most."""
    size = rank_and_size(None)[1]
    model = XtrainModel(
        CONFIG,
        init_mesh((size,), ("context",)),
        context_balance=balance,
        dtype=torch.float64,
    )
    x, labels = batch(tokens)
    positions = torch.arange(tokens)
    if change == CHANGES[4]:
        positions = unshard_sequence(positions[: tokens // size], 0, balance)
    logits, own = model(x, positions=positions), shard_sequence(labels, 1, balance)
    total = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum")
    count = (labels != -100).sum().double()
    if change == CHANGES[1]:
        total, count = total / (own != -100).sum().clamp(min=1), count / count * size
    (total / count).backward()
    loss = total.detach() / count
    dist.all_reduce(loss)
    if change != CHANGES[3]:
        model.sync_gradients()
    found = [loss]
    for parameter in model.parameters():
        assert parameter.grad is not None
        found.append(parameter.grad / size if change == CHANGES[2] else parameter.grad)
    errors = [
        float((a - b).norm() / b.norm())
        for a, b in zip(found, one_process(tokens), strict=True)
    ]
    return [errors[0], max(errors[1:])]
