"""Functions that run on every rank for the questions of lc6."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from xtrain.comm import CommLedger
from xtrain.comm.checks import rank_and_size
from xtrain.context_parallel import local_positions, ring_attention, shard_sequence
from xtrain.context_parallel.block_attention import TILES, BlockAttention
from xtrain.context_parallel.ring_attention import Ring

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


# ------------------------------------------------ a model with attention in the middle

VOCABULARY, HEADS, WIDTH = 11, 2, 8


class Small(nn.Module):
    """Embedding, one attention with rotary positions, and a head."""

    def __init__(self, attention: Callable[..., Tensor]):
        super().__init__()
        generator = torch.Generator().manual_seed(5)

        def weight(*shape: int) -> nn.Parameter:
            drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
            return nn.Parameter(drawn)

        self.embedding = weight(VOCABULARY, WIDTH)
        self.qkv = weight(3 * WIDTH, WIDTH)
        self.head = weight(VOCABULARY, WIDTH)
        self.attention = attention

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding)
        q, k, v = F.linear(x, self.qkv).unflatten(-1, (3, HEADS, -1)).unbind(-3)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = self.attention(rotated(q, positions), rotated(k, positions), v)
        return F.linear(x + out.transpose(1, 2).flatten(2), self.head)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding of [B, H, S, D]."""
    half = x.shape[-1] // 2
    angles = positions.double().unsqueeze(-1) * 0.5 ** torch.arange(half)
    first, second = x.split(half, -1)
    turned = torch.cat([-second, first], -1)
    return x * angles.cos().repeat(1, 2) + turned * angles.sin().repeat(1, 2)


def batch(tokens: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels; most labels of the first half do not count."""
    generator = torch.Generator().manual_seed(6)
    drawn = torch.randint(VOCABULARY, (2, 2, tokens), generator=generator)
    labels = drawn[1]
    labels[:, : tokens // 2 - 1] = -100
    return drawn[0], labels


def one_process(tokens: int) -> list[Tensor]:
    """Loss and gradients with the whole sequence."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model = Small(attention)
    x, labels = batch(tokens)
    logits = model(x, torch.arange(tokens))
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


CHANGES = (
    "no mistake",
    "each rank divides by its own count",
    "gradients are averaged",
    "gradients are not summed",
    "positions count from 0 on each rank",
)


def error_of_model(change: str, balance: str, tokens: int) -> list[float]:
    """Relative errors of the loss, and of the gradient that is off most."""
    size = rank_and_size(None)[1]

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ring_attention(q, k, v, True, balance)

    model = Small(attention)
    x, labels = (shard_sequence(t, 1, balance) for t in batch(tokens))
    positions = local_positions(tokens // size, balance)
    if change == CHANGES[4]:
        positions = torch.arange(tokens // size)
    logits = model(x, positions).flatten(0, 1)
    total = F.cross_entropy(logits, labels.flatten(), reduction="sum")
    count = (labels != -100).sum().double()
    if change == CHANGES[1]:
        total, count = total / count.clamp(min=1), torch.tensor(float(size))
    else:
        dist.all_reduce(count)
    (total / count).backward()
    loss = total.detach() / count
    dist.all_reduce(loss)
    found = [loss]
    for parameter in model.parameters():
        assert parameter.grad is not None
        if change != CHANGES[3]:
            dist.all_reduce(parameter.grad)
        if change == CHANGES[2]:
            parameter.grad /= size
        found.append(parameter.grad)
    errors = [
        float((a - b).norm() / b.norm())
        for a, b in zip(found, one_process(tokens), strict=True)
    ]
    return [errors[0], max(errors[1:])]
