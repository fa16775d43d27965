"""The run that every parallelism has to reproduce: model, batches, training loop.

Sizes divide by 4 where a later lecture cuts them. Batches are made to catch mistakes:
rows have different numbers of tokens, and every fourth batch has only three rows, so
that ranks have different numbers of rows, and of four ranks the last one has none.

AdamW hides a constant factor of the gradient. So gradients are clipped, which a factor
changes, and their norm before clipping is part of the curve.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from xtrain.model import XtrainConfig, XtrainModel

CONFIG = XtrainConfig(
    vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=4,
    num_attention_heads=8, num_key_value_heads=4, head_dim=4, initializer_range=0.2,
)  # fmt: skip
STEPS, SEQUENCE = 20, 16
ROWS = (8, 8, 8, 3)
ADAMW: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1}
MAX_NORM = 1.25
IGNORED = -100


def batch(step: int) -> tuple[Tensor, Tensor]:
    """Tokens and labels of a step, [rows, SEQUENCE].

    A token mostly decides the next one, so there is something to learn. Labels from a
    row's own length on are ignored.
    """
    generator = torch.Generator().manual_seed(step)
    rows = ROWS[step % len(ROWS)]

    def draw(high: int, *shape: int) -> Tensor:
        return torch.randint(high, shape, generator=generator)

    columns = [draw(CONFIG.vocab_size, rows)]
    for _ in range(SEQUENCE):
        follows = (5 * columns[-1] + 3) % CONFIG.vocab_size
        noise = draw(CONFIG.vocab_size, rows)
        columns.append(torch.where(draw(8, rows) == 0, noise, follows))
    text = torch.stack(columns, dim=1)
    lengths = 2 + draw(SEQUENCE - 1, rows, 1)
    labels = text[:, 1:].masked_fill(torch.arange(SEQUENCE) >= lengths, IGNORED)
    return text[:, :-1], labels


@dataclass
class Training:
    """A model, in wrappers or not, and what its loop calls.

    Attributes:
        gradients: forward and backward of a rank's rows; the mean loss over the tokens
            of all ranks.
        clip: scales the gradients to a norm; returns the norm before.
        exact: False if it computes with 16-bit numbers.
        data: the ranks that bring different rows; None for one process.
    """

    model: Any
    optimizer: Optimizer
    gradients: Callable[[Tensor, Tensor], Tensor]
    clip: Callable[[float], Tensor]
    exact: bool = True
    data: ProcessGroup | None = None


def one_process() -> Training:
    """No wrapper, the whole batch."""
    model = XtrainModel(CONFIG, dtype=torch.float64)

    def gradients(tokens: Tensor, labels: Tensor) -> Tensor:
        loss = model(tokens, labels)
        loss.backward()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    return Training(model, optimizer, gradients, clip(model))


def clip(model: nn.Module) -> Callable[[float], Tensor]:
    """Clip by the norm of the gradients that are here."""
    return lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)


def run(training: Training) -> dict[str, Any]:
    """Train for STEPS steps; each step's loss and gradient norm, the same on all ranks.

    The loss is a sum over the valid tokens of all ranks, divided once by their count.
    """
    group = training.data
    rank, size = (0, 1) if group is None else (group.rank(), group.size())
    curve: dict[str, Any] = {"exact": training.exact, "loss": [], "norm": []}
    for step in range(STEPS):
        tokens, labels = (whole[rank::size] for whole in batch(step))
        training.optimizer.zero_grad()
        curve["loss"].append(training.gradients(tokens, labels).item())
        curve["norm"].append(training.clip(MAX_NORM).item())
        training.optimizer.step()
    return curve
