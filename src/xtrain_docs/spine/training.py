"""The run that every parallelism has to reproduce: model, batches, training loop.

Sizes divide by 4 where a later lecture cuts them. Batches are made to catch mistakes:
rows have different numbers of tokens, and every fourth batch has only three rows, so
that ranks have different numbers of rows, and of four ranks the last one has none.

AdamW hides a constant factor of the gradient. So gradients are clipped, which a factor
changes, and their norm before clipping is part of the curve.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
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
ADAMW = {"lr": 0.02, "weight_decay": 0.1}
MAX_NORM = 1.25
IGNORED = -100


def new_model(dtype: torch.dtype = torch.float64) -> XtrainModel:
    """The tiny model, with the weights of its seed."""
    return XtrainModel(CONFIG, dtype=dtype)


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
    """A wrapped model and what its loop calls.

    Attributes:
        model: called with tokens and labels, gives their mean loss; its wrapper adds
            gradients up over the ranks.
        clip: scales the gradients to a norm; returns the norm before.
        reduce: called between the last backward and `clip`.
        micro_batches: parts of a rank's rows; all but the last run in `no_sync`.
        exact: False if it computes with 16-bit numbers.
        data: the ranks that bring different rows; all unless given.
        mean_of_all: the model's loss is the mean over all ranks' tokens already.
        whole_step: forward and backward of all of a rank's rows in one call, which
            gives the mean loss over all ranks' tokens; `model` is not called then.
    """

    model: Any
    optimizer: Optimizer
    clip: Callable[[float], Tensor]
    reduce: Callable[[], None] = lambda: None
    micro_batches: int = 1
    exact: bool = True
    data: ProcessGroup | None = None
    mean_of_all: bool = False
    whole_step: Callable[[Tensor, Tensor], Tensor] | None = None

    def split(self, rows: Tensor) -> tuple[Tensor, ...]:
        """A rank's rows in parts; some are empty when there are too few."""
        return rows.tensor_split(self.micro_batches)

    def sync(self, is_last: bool) -> AbstractContextManager[None]:
        """`no_sync` for every micro-batch but the last."""
        return nullcontext() if is_last else self.model.no_sync()


def one_process() -> Training:
    """No wrapper, the whole batch."""
    model = new_model()
    return Training(model, torch.optim.AdamW(model.parameters(), **ADAMW), clip(model))


def clip(model: nn.Module) -> Callable[[float], Tensor]:
    """Clip whole gradients, which every rank has."""
    return lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)


def run(training: Training) -> dict[str, Any]:
    """Train for STEPS steps; each step's loss and gradient norm, the same on all ranks.

    The loss is a sum over the valid tokens of all ranks, divided once by their count.
    """
    rank, size = place(training.data)
    curve: dict[str, Any] = {"exact": training.exact, "loss": [], "norm": []}
    for step in range(STEPS):
        tokens, labels = (whole[rank::size] for whole in batch(step))
        training.optimizer.zero_grad()
        loss = gradients(training, tokens, labels)
        training.reduce()
        curve["norm"].append(training.clip(MAX_NORM).item())
        training.optimizer.step()
        curve["loss"].append(loss.item())
    return curve


def gradients(training: Training, tokens: Tensor, labels: Tensor) -> Tensor:
    """Forward and backward of a rank's rows; the loss of all ranks."""
    if training.whole_step is not None:
        return training.whole_step(tokens, labels)
    count = total((labels != IGNORED).sum(), training.data)
    loss = torch.zeros((), dtype=torch.float64)
    parts = list(zip(*map(training.split, (tokens, labels)), strict=True))
    for part in parts:
        with training.sync(is_last=part is parts[-1]):
            share = (part[1] != IGNORED).sum() / count.double()
            part_loss = training.model(*part)
            if not training.mean_of_all:
                part_loss = part_loss * share
            part_loss.backward()
        loss += part_loss.detach()
    return loss if training.mean_of_all else total(loss, training.data)


def place(group: ProcessGroup | None = None) -> tuple[int, int]:
    """Rank and size of the group; 0 of 1 in one process."""
    if not dist.is_initialized():
        return 0, 1
    return dist.get_rank(group), dist.get_world_size(group)


def total(number: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """The sum of all ranks' numbers."""
    if dist.is_initialized():
        dist.all_reduce(number, group=group)
    return number
