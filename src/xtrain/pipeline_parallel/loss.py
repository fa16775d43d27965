"""The loss of a step: a sum and a count, added up over this rank's micro-batches."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

LossFunction = Callable[[Any, Any], tuple[Tensor, Tensor | int]]


class StepLoss:
    """The sum (float64) and the count of the micro-batches that end on this rank.

    Without a `loss_fn` the outputs are kept.
    """

    def __init__(self, loss_fn: LossFunction | None, targets: Mapping[int, Any]):
        self.loss_fn, self._targets = loss_fn, dict(targets)
        self.total: Tensor | float = 0.0
        self.count: Tensor | int = 0
        self.outputs: dict[int, Any] = {}
        self._counts: list[Tensor | int] = []

    def add(self, i: int, output: Any) -> Any:
        """The sum of a micro-batch's loss, whose backward is the micro-batch's."""
        if self.loss_fn is None:
            self.outputs[i] = output
            return output
        total, count = checked_loss(self.loss_fn(output, self._targets.pop(i)), output)
        self._counts.append(count)
        self.total = self.total + total.detach().double()
        self.count = self.count + count
        return total

    def wrong_count(self) -> str | None:
        """Asked once, at the end: to read a count waits for the device that has it."""
        counts = [float(count) for count in self._counts if has_value(count)]
        wrong = [count for count in counts if not 0 <= count < torch.inf]
        if not wrong:
            return None
        return (
            f"loss_fn returned a count of {wrong[0]:g}: that of a micro-batch is a "
            "finite number of at least 0"
        )


def has_value(number: Tensor | float) -> bool:
    """A tensor on "meta" has a shape alone."""
    return not (isinstance(number, Tensor) and number.is_meta)


def checked_loss(returned: Any, output: Any) -> tuple[Tensor, Any]:
    """What loss_fn returned; ValueError if no backward can begin there."""
    if not isinstance(returned, tuple | list) or len(returned) != 2:
        kind = type(returned).__name__
        raise ValueError(f"loss_fn returned {kind}, but needs to return (sum, count)")
    total, count = returned
    for name, value in (("sum", total), ("count", count)):
        if isinstance(value, Tensor) and value.numel() != 1:
            raise ValueError(
                f"loss_fn returned a {name} of shape {list(value.shape)}, but the "
                "sum and the count of a micro-batch are one number each"
            )
    if not isinstance(total, Tensor) or not isinstance(count, Tensor | int | float):
        kinds = f"({type(total).__name__}, {type(count).__name__})"
        raise ValueError(
            f"loss_fn returned {kinds}: the sum is a tensor, the count a number"
        )
    outputs = output if isinstance(output, tuple | list) else (output,)
    trains = any(getattr(tensor, "requires_grad", False) for tensor in outputs)
    trains = trains and torch.is_grad_enabled()
    if trains and not total.requires_grad and float(count) != 0:
        raise ValueError(
            "loss_fn returned a sum that is detached from the output: its gradient "
            "would be 0 everywhere"
        )
    return total, count
