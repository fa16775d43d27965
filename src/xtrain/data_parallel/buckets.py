"""Gradients packed into flat buckets, so that one all-reduce serves many.

    parameters   p0 p1 p2 p3 p4 p5        backward reaches p5 first, p0 last
    buckets      [p5 p4 p3] [p2 p1 p0]    so the first bucket is full, and is reduced,
                                          while backward still computes the second

A parameter's `grad` becomes a view of its bucket: what the all-reduce writes is what
the optimizer reads, with no copy in between.
"""

from collections import defaultdict

import torch
from torch import nn

from xtrain.comm.main_grad import gradient_dtype, set_gradient

FIRST_BUCKET_BYTES = 1 << 20  # a small one first: sending begins sooner


class Bucket:
    """Gradients of some parameters in one flat tensor.

    Args:
        parameters: all of one dtype on one device.
        spare: elements beyond the gradients.
    """

    def __init__(self, parameters: list[nn.Parameter], spare: int = 0):
        self.parameters = parameters
        sizes = [p.numel() for p in parameters]
        first = parameters[0]
        self.flat = torch.zeros(
            sum(sizes) + spare, dtype=gradient_dtype(first), device=first.device
        )
        pieces = self.flat[: sum(sizes)].split(sizes)
        self.views = {
            p: piece.view(p.shape) for p, piece in zip(parameters, pieces, strict=True)
        }
        self.spare = self.flat[sum(sizes) :]
        self.waiting: set[nn.Parameter] = set(parameters)

    def take(self, parameter: nn.Parameter, divisor: int) -> None:
        """Move a parameter's gradient, divided, into the bucket; it may be there."""
        view, grad = self.views[parameter], parameter.grad
        if grad is None:
            view.zero_()
        elif grad.dtype == view.dtype:
            # one pass over memory; dividing the sum later would be a second one
            torch.div(grad, divisor, out=view)
            parameter.grad = view
        else:  # torch.div would round the quotient to 16 bits
            set_gradient(parameter, view.copy_(grad).div_(divisor))
        self.waiting.discard(parameter)


def make_buckets(parameters: list[nn.Parameter], cap_bytes: int) -> list[Bucket]:
    """Buckets in the order in which backward fills them: the last parameter first.

    The last bucket has one spare element.
    """
    groups: dict[object, list[list[nn.Parameter]]] = defaultdict(lambda: [[]])
    order: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        dtype = gradient_dtype(parameter)
        lists = groups[parameter.dtype, dtype, parameter.device]
        limit = FIRST_BUCKET_BYTES if lists[-1] is lists[0] else cap_bytes
        together = dtype.itemsize * sum(p.numel() for p in (*lists[-1], parameter))
        if lists[-1] and together > min(limit, cap_bytes):
            lists.append([])
        if not lists[-1]:
            order.append(lists[-1])
        lists[-1].append(parameter)
    return [Bucket(members, spare=int(members is order[-1])) for members in order]
