# python snippets/lc3/master_weights.py
import torch
from torch import nn

from xtrain.zero import MixedPrecisionOptimizer

# 100 steps of 0.001 down from 1. In bfloat16 the next number below 1 is 0.99609375.
weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
plain = torch.optim.SGD([weight], lr=0.001)
for _step in range(100):
    weight.grad = torch.ones(1, dtype=torch.bfloat16)
    plain.step()
print("bfloat16 alone:          ", weight.item())

weight = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
mixed = MixedPrecisionOptimizer([weight], torch.optim.SGD, lr=0.001)
for _step in range(100):
    weight.grad = torch.ones(1, dtype=torch.bfloat16)
    mixed.step()
((_, master),) = mixed.pairs
print(f"with an fp32 master:      {weight.item()}, master {master.item():.4f}")
