# python snippets/wrong/lc3/sums_in_bf16.py
import torch
from torch import nn


def accumulate(layer, batches):
    """The gradient of the summed loss of all micro-batches."""
    for batch in batches:
        layer(batch).sum().backward()  # the bug: adds to a bfloat16 gradient
    return layer.weight.grad


if __name__ == "__main__":
    for count in (100, 200, 300, 1000):
        layer = nn.Linear(1, 1, bias=False).bfloat16()
        batch = torch.ones(1, 1).bfloat16()  # its gradient is 1
        gradient = accumulate(layer, [batch] * count)
        print(f"{count:4} micro-batches: gradient {gradient.item():.0f}")
