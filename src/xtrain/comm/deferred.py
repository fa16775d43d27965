"""Gradients of weights that a backward leaves for later: where a function asks.

    forward     y = x W^T              the function takes a stand-in for W
    input       dx = dy W              what dW needs is queued: x, dy
    weight      dW = dy^T x            computed from the queue, handed to W

Pipeline schedules want the two parts of backward apart. An autograd function that
multiplies with a weight asks `stand_ins` in forward; if gradients are to wait, it gets
a `Later`, to which its backward gives what it would compute. Who keeps them is in
QUEUES: `xtrain.pipeline_parallel` puts its lookup there, and nothing does in a copy of
a layer.

Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

Compute = Callable[..., Sequence[Tensor | None]]


class Later(Protocol):
    """What an autograd function gives its weights' gradients to."""

    def add(self, compute: Compute, *tensors: Tensor) -> None:
        """Have `compute(*tensors)` give the gradients of the weights, later.

        Nothing may write into the tensors until then. `compute` must not hold others.
        """
        ...


QUEUES: list[Callable[..., tuple[Later | None, tuple[Tensor, ...]]]] = []


def stand_ins(*weights: Tensor) -> tuple[Later | None, tuple[Tensor, ...]]:
    """Where the gradients of these go, and what takes the weights' place in a function.

    (None, weights) if no gradients are to wait here.
    """
    return QUEUES[0](*weights) if QUEUES else (None, weights)


class BackwardAlwaysRuns(torch.autograd.Function):
    """Base of a function whose backward must run, with None for absent gradients.

    A weight that is the output of such a function has no stand-in that is cut off from
    the graph: the backward of the inputs reaches the function too.
    """


def backward_always_runs(node: object) -> bool:
    """Whether a tensor's `grad_fn` is of a `BackwardAlwaysRuns`."""
    return issubclass(getattr(node, "_forward_cls", object), BackwardAlwaysRuns)
