# python snippets/lc3/adam.py
import torch
from torch import nn

from xtrain.zero import Adam, AdamW


def train(optimizer_class, **options) -> torch.Tensor:
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(1000))
    target = torch.randn(1000)
    optimizer = optimizer_class([weight], lr=0.01, weight_decay=0.1, **options)
    for _step in range(100):
        loss = (weight - target).square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return weight.detach()


for ours, theirs in ((Adam, torch.optim.Adam), (AdamW, torch.optim.AdamW)):
    for options in ({}, {"amsgrad": True}):
        apart = (train(ours, **options) - train(theirs, **options)).abs().max().item()
        print(f"{ours.__name__:5} {options}: 100 steps, equal: {apart < 1e-6}")

# The first step is lr, whatever the size of the gradient.
for size in (1e-4, 1.0, 1e4):
    weight = nn.Parameter(torch.zeros(1))
    optimizer = Adam([weight], lr=0.01)
    weight.grad = torch.tensor([size])
    optimizer.step()
    print(f"gradient {size:g}: first step {-weight.item():.4f}")
