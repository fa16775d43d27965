"""Gradients of before a step, kept apart from those that it adds up.

grad    before | None, then the step's sums | before + sums / count
               | a step that fails          | before
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from xtrain.comm.main_grad import add_to_gradient, leave_gradient, unround


class SetAside:
    """Takes the gradients of parameters away until a step is over.

    Args:
        parameters: their `grad` is None from now on.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]):
        self.before = {p: kept(unround(p)) for p in parameters}
        for parameter in self.before:
            parameter.grad = None

    def put_back(self) -> None:
        """Give the parameters what they had; the step's gradients are dropped."""
        for parameter, old in self.before.items():
            parameter.grad = None
            if old is not None:
                leave_gradient(parameter, old)

    @torch.no_grad()
    def add(self, count: Tensor) -> None:
        """Divide the step's gradients by the count, and add what was there before."""
        for parameter, old in self.before.items():
            new = unround(parameter)
            if new is not None:
                new.div_(count.to(new.device))
            parts = [part for part in (old, new) if part is not None]
            parameter.grad = None
            for part in parts:
                add_to_gradient(parameter, part)


def kept(gradient: Tensor | None) -> Tensor | None:
    """A gradient that stays while others are summed: DDP's is a view of its bucket."""
    if type(gradient) is Tensor and gradient._base is not None:
        return gradient.clone()
    return gradient
