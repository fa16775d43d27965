"""Which dense tensor a collective carries, and what it is on both sides of it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from .runs_dataflow_match import state_of
from .runs_dataflow_record import Point, Sent

Sides = tuple[list[Tensor], list[Tensor]]


def by_rank(tensor: Tensor | None) -> list[Tensor] | None:
    """What each rank has of it."""
    held: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(held, tensor)
    return None if any(one is None for one in held) else held


def sides_of(sent: Sent) -> Sides:
    """What every rank handed over, and what it got."""
    return by_rank(sent.before) or [], by_rank(sent.after) or []


@dataclass
class Placed:
    """A collective with the dense tensor it carries, and its state on both sides."""

    kind: str
    name: str
    before: str
    after: str


def placed(
    kind: str, sides: Sides, names: Iterable[str], dense: dict[str, Point], grad: bool
) -> Placed | None:
    """The collective, if it carries one of these dense tensors."""
    for name in names:
        whole = dense[name].grad if grad else dense[name].value
        if whole is not None:
            before, after = (state_of(side, whole) for side in sides)
            if before and after:
                return Placed(kind, name, before, after)
    return None


class Waiting:
    """Collectives of the backward, until each has its place in the picture."""

    def __init__(self, sent: Sequence[Sent], dense: dict[str, Point]):
        self.dense = dense
        self.left = [(one.kind, sides_of(one)) for one in sent]

    def claim(self, names: Sequence[str], grad: bool) -> Placed | None:
        """The first that carries one of these, or its gradient."""
        for at, (kind, sides) in enumerate(self.left):
            found = placed(kind, sides, names, self.dense, grad)
            if found:
                del self.left[at]
                return found
        return None

    def claim_sum(self, grad: Tensor) -> None:
        """The sum of a shared weight's gradient: it is shown with the weight."""
        for at, (_, (_, after)) in enumerate(self.left):
            if state_of(after, grad) == "replicated":
                del self.left[at]
                return
