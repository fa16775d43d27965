# python snippets/lc5/recompute.py

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from xtrain.pipeline_parallel import checkpoint

torch.manual_seed(0)
blocks = [
    nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64))
    for _ in range(4)
]
weights = [w for block in blocks for w in block.parameters()]
x = torch.randn(32, 64)


def step(recompute: bool) -> tuple[int, list[torch.Tensor | None]]:
    """What forward keeps, and the gradients."""
    kept = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.nbytes
        return tensor.detach()

    torch.manual_seed(1)  # the same dropout masks in both steps
    h = x
    with saved_tensors_hooks(note, lambda tensor: tensor):
        for block in blocks:
            h = checkpoint(block, h) if recompute else block(h)
    for weight in weights:
        kept.pop(weight.data_ptr(), None)
        weight.grad = None
    h.square().mean().backward()
    return sum(kept.values()), [weight.grad for weight in weights]


plain, expected = step(recompute=False)
kept, gradients = step(recompute=True)
print(f"no recompute keeps {plain:,} bytes, recompute {kept:,}: four inputs of x")
print(f"x has {x.nbytes:,} bytes")
pairs = zip(expected, gradients, strict=True)
print("gradients have the same bits:", all(torch.equal(a, b) for a, b in pairs))
