# python snippets/lc5/cut_sequential.py
from itertools import pairwise

import torch
from torch import nn

from xtrain.pipeline_parallel import PipelineStage, balanced_cut

sizes = [16, 64, 64, 64, 256, 16, 16, 16]
model = nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))
costs = [layer.weight.numel() for layer in model]  # in proportion to its FLOPs
print("costs", costs)
for parts in (2, 3):
    cut = balanced_cut(costs, parts)
    print([list(part) for part in cut], [sum(costs[i] for i in part) for part in cut])

stages = [
    PipelineStage(model[part.start : part.stop], index, len(cut))
    for index, part in enumerate(cut)
]
x = torch.randn(4, 16)
out = x
for stage in stages:
    out = stage(out)
print("the same output:", torch.equal(out, model(x)))
