"""A step whose loss or gradients are not finite: which rank, layer and tensor it began.

    loss, norm --- finite ---> optimizer.step()
        |
        +-- nan or inf: weights stay as they are, on all ranks
              weights not finite already?  ----------------> name the parameter
              the same step again, every tensor looked at -> name rank, phase, tensor
                                       nothing found ------> it did not come again

A step is a function of its number: data and dropout are the same when it is run again.
Every rank raises the same error, and the last checkpoint has good weights.

Cost: two numbers on the host are compared as long as they are finite; else one more
step, and a gather of a line from each rank.
"""

import math
import socket
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import NoReturn

from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from xtrain.comm.agreement import values_of_all
from xtrain.train.nonfinite_watch import First, Watch, not_finite, without_compile
from xtrain.train.places import place_of
from xtrain.train.steps import update_balance_biases
from xtrain.train.wrap import WrappedModel


class NonFiniteGuard:
    """Stands between the gradients and the update; every rank has one.

    Args:
        allowed: so many steps in a row are left out, on all ranks; the next one ends
            the run. 0 ends it at the first.
    """

    def __init__(
        self, model: WrappedModel, mesh: DeviceMesh, optimizer: Optimizer, allowed: int
    ):
        self.model, self.mesh, self.optimizer = model, mesh, optimizer
        self.allowed, self.in_a_row = allowed, 0

    def leaves_out(
        self, step: int, loss: float, norm: float, repeat: Callable[[], object]
    ) -> str:
        """Why the update is left out; empty if it is not. Every rank calls it.

        Gradients and the counts of routers are cleared then, weights stay.

        Args:
            step: of the run, the first one is 1.
            loss, norm: of all ranks, so the same on each.
            repeat: forward and backward of the step.

        Raises:
            FloatingPointError: on every rank, naming the first rank and tensor: a
                weight is not finite, or no more steps may be left out.
        """
        if math.isfinite(loss) and math.isfinite(norm):
            self.in_a_row = 0
            return ""
        wrong = f"loss is {loss}" if not math.isfinite(loss) else f"norm is {norm}"
        what, place = f"step {step}: {wrong}", place_of(self.mesh)
        check_weights(what, place, self.model)
        self.optimizer.zero_grad()
        update_balance_biases(self.model, 0.0)
        self.in_a_row += 1
        if self.in_a_row > self.allowed:
            raise_first(what, place, self.model, repeat)
        return f"{what}, left out: {self.in_a_row} of {self.allowed} in a row"


def check_weights(what: str, place: str, model: WrappedModel) -> None:
    """FloatingPointError on every rank if a weight of any is not finite."""
    weights = first_of(model.named_parameters())
    everywhere = values_of_all((place, weights), None)
    wrong = [f"{rank}: {text}" for rank, text in everywhere if text]
    if wrong:
        raise FloatingPointError(
            f"{what}; weights were not finite before it: {among(wrong)}"
        )


def raise_first(
    what: str, place: str, model: WrappedModel, repeat: Callable[[], object]
) -> NoReturn:
    """Run the step again and raise for what is found."""
    compiled = any(layer._compiled_call_impl for p in model.parts for layer in p.layers)
    with without_compile() if compiled else nullcontext(), Watch(model.parts) as watch:
        repeat()
    left = first_of((name, p.grad) for name, p in model.named_parameters())
    ranks = values_of_all((place, socket.gethostname(), watch.first, left), None)
    raise FloatingPointError(f"{what}; {verdict(ranks)}")


def first_of(named: Iterable[tuple[str, Tensor | None]]) -> str:
    """The first tensor that is not finite; empty if all are."""
    for name, tensor in named:
        if tensor is not None and (bad := not_finite(tensor)):
            return f"{name}, {bad}"
    return ""


def verdict(ranks: list[tuple[str, str, First | None, str]]) -> str:
    """Who is to blame.

    Of ranks that computed it themselves the earliest: forward comes before backward.

    Args:
        ranks: of each its place, its host, its first tensor, and a gradient it holds.
    """
    found = [(first[:3], place, first.text) for place, _, first, _ in ranks if first]
    if found:
        own = sorted(entry for entry in found if not entry[0][0]) or sorted(found)
        return f"first on {among([f'{place}: {text}' for _, place, text in own])}"
    left = [f"{place}: gradient of {text}" for place, _, _, text in ranks if text]
    if left:
        return f"every output is finite; on {among(left)}"
    hosts = ", ".join(dict.fromkeys(host for _, host, _, _ in ranks))
    return (
        "run again, every tensor of it is finite: suspect the hardware, on one of "
        f"{hosts}, or an operation that is not deterministic"
    )


def among(texts: list[str]) -> str:
    """The first of what several ranks tell."""
    others = len(texts) - 1
    return texts[0] + (f"; likewise on {others} more" if others else "")
