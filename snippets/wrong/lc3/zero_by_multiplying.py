# python snippets/wrong/lc3/zero_by_multiplying.py
import torch
from torch import nn


def zero_grad(parameters):
    """Meant: forget the gradients, and keep their memory."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(0)  # the bug: 0 times NaN is NaN


def set_to_none(parameters):
    for parameter in parameters:
        parameter.grad = None


def train(zero_grad, steps):
    """Steps taken or skipped, with an overflow in step 1."""
    weight, taken = nn.Parameter(torch.ones(2)), []
    for step in range(steps):
        zero_grad([weight])
        factor = float("inf") if step == 1 else 1.0
        (weight * factor).sum().backward()
        finite = bool(torch.isfinite(weight.grad).all())
        if finite:
            weight.data.sub_(0.1 * weight.grad)
        taken.append("taken" if finite else "skipped")
    return taken, weight.grad


if __name__ == "__main__":
    for name, forget in (("times zero", zero_grad), ("set to none", set_to_none)):
        taken, gradient = train(forget, 5)
        print(f"{name}: {' '.join(taken)}, last gradient {gradient.tolist()}")
