"""What a stage keeps of a micro-batch between its forward and its backward.

    inputs ---- graph of the stage ----> outputs        F keeps inputs and graph
    gradients of inputs <---- gradients of outputs      B, BW free them
                                                        W is left, if it was B

The outputs themselves are not kept: backward begins at their edges of the graph, so
their memory is free as soon as they have been sent.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from xtrain.comm.deferred import suspended
from xtrain.pipeline_parallel.split_backward import SplitBackward, split_backward
from xtrain.schedules import Schedule


def as_tuple(value: Any, what: str) -> tuple[Tensor, ...]:
    """A tensor, or a tuple or list of them, as a tuple; TypeError for anything else."""
    values = tuple(value) if isinstance(value, tuple | list) else (value,)
    for one in values:
        if not isinstance(one, Tensor):
            raise TypeError(
                f"{what} is {type(one).__name__}, not a tensor or a tuple of tensors"
            )
    return values


def micro_batches(batch: Tensor | Sequence[Tensor] | None, count: int) -> list[Any]:
    """A batch cut along dimension 0 into `count` parts; nothing for None."""
    if batch is None:
        return []
    if isinstance(batch, Tensor):
        return list(torch.tensor_split(batch, count))
    return list(zip(*(torch.tensor_split(t, count) for t in batch), strict=True))


def own_micro_batches(
    batch: Any, stage: int, *, schedule: Schedule, rank: int
) -> dict[int, Any]:
    """Those of a batch that are in this stage on this rank, by their number."""
    numbers = range(schedule.micro_batches)
    own = [i for i in numbers if schedule.rank_of(stage, i) == rank]
    rows = micro_batches(batch, len(numbers)) if own else []
    return {i: rows[i] for i in own if rows}


def received(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What another stage on this rank returned, as if it had been sent."""
    return tuple(t.detach().requires_grad_(t.requires_grad) for t in tensors)


class MicroBatch:
    """One micro-batch in one stage; `splits` if its backward comes in two parts."""

    def __init__(self, module: nn.Module, splits: bool):
        self.module = module
        self.split: SplitBackward | None = None
        self._splits, self._is_split = splits, False
        self.inputs: tuple[Tensor, ...] = ()
        self.outputs: list[GradientEdge] = []
        self.gradients: list[Tensor | None] = []

    def recording(self) -> AbstractContextManager:
        """The context of its forward."""
        if not self._splits:
            return nullcontext()
        context = split_backward()
        self.split = context
        return context

    def keep(self, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        """Remember where backward begins and ends."""
        self.inputs = inputs
        self.outputs = [get_gradient_edge(t) for t in outputs if t.requires_grad]

    def begin_backward(self, gradients: tuple[Tensor, ...] | None) -> "MicroBatch":
        """Give it the gradients of its outputs; None for a loss."""
        self.gradients = [None] if gradients is None else list(gradients)
        return self

    def __call__(self) -> None:
        """The full backward, from `outputs` and their `gradients`."""
        if self.outputs:
            with suspended():  # an overlapped pair's forward may be under way
                torch.autograd.backward(self.outputs, self.gradients)

    def backward_input(self) -> None:
        """Backward without the gradients of the weights."""
        if self.outputs and self.split is not None:
            self.split.backward_input(self.outputs, self.gradients)
            self._is_split = True

    def backward_weight(self) -> None:
        """The gradients of the weights, which `backward_input` left."""
        if self.split is not None and self._is_split:
            self.split.backward_weight()

    def end_backward(self) -> tuple[Tensor, ...]:
        """The gradients of the inputs; frees the graph."""
        gradients = tuple(
            torch.zeros_like(t) if t.grad is None else t.grad
            for t in self.inputs
            if t.requires_grad
        )
        self.inputs, self.outputs, self.gradients = (), [], []
        return gradients
