# python snippets/wrong/lc3/scaled_twice.py
import torch
from torch import nn

SCALE = 1024.0


def unscale(gradient):
    """Meant: the gradient of the loss, from that of SCALE times the loss."""
    return gradient.float() * SCALE  # the bug: it must be divided


def train(optimizer_class, unscale, max_norm=None):
    weight = nn.Parameter(torch.tensor([1.0, 1.0]))
    optimizer = optimizer_class([weight], lr=0.1)
    for _step in range(3):
        (SCALE * weight.square().sum()).backward()
        weight.grad = unscale(weight.grad)
        if max_norm is not None:
            nn.utils.clip_grad_norm_([weight], max_norm)
        optimizer.step()
        optimizer.zero_grad()
    return weight[0].item()


if __name__ == "__main__":
    for name, optimizer_class, max_norm in (
        ("Adam", torch.optim.Adam, None),
        ("SGD, clipped", torch.optim.SGD, 1.0),
        ("SGD", torch.optim.SGD, None),
    ):
        found = train(optimizer_class, unscale, max_norm)
        right = train(optimizer_class, lambda g: g / SCALE, max_norm)
        print(f"{name}: weight after 3 steps {found:.4g}, right is {right:.4g}")
