# python snippets/lc5/split_backward.py
import torch
from torch import nn

from xtrain.pipeline_parallel import split_backward

torch.manual_seed(0)
stage = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))
stage.double()
inputs = [torch.randn(3, 4, dtype=torch.double, requires_grad=True) for _ in range(2)]
dy = torch.ones(3, 4, dtype=torch.double)


def gradients():
    return {name: p.grad for name, p in stage.named_parameters() if p.grad is not None}


for x in inputs:  # two plain backwards, to compare with
    stage(x).backward(dy)
expected, dx = gradients(), [x.grad for x in inputs]
stage.zero_grad()
inputs = [x.detach().requires_grad_() for x in inputs]

running = []
for x in inputs:  # F0 F1
    with split_backward() as split:
        running.append((split, stage(x)))
for micro_batch, (split, y) in enumerate(running):  # B0 B1
    split.backward_input(y, dy)
    print(f"after B{micro_batch}: {sorted(gradients())}, kept {split.kept_bytes} bytes")
print("dx:", [torch.equal(x.grad, right) for x, right in zip(inputs, dx, strict=True)])

for split, _ in running:  # W0 W1, where a rank would be idle
    split.backward_weight()
    print(f"after W: {len(gradients())} gradients, kept {split.kept_bytes} bytes")
print("dW:", all(torch.equal(g, expected[name]) for name, g in gradients().items()))
