"""The MLP that gathers after each layer, against the dense one."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from tests.tensor_parallel.dense import (
    ON_GROUPS,
    close,
    fill,
    mine,
    on_group,
    random_of,
)
from xtrain.tensor_parallel import AllGatherMLP

MLP = "xtrain.tensor_parallel.mlp:AllGatherMLP"


class Dense(nn.Module):
    def __init__(self, hidden: int, inner: int, bias: bool, activation=F.gelu):
        super().__init__()
        self.up_proj = nn.Linear(hidden, inner, bias)
        self.down_proj = nn.Linear(inner, hidden, bias)
        self.activation = activation

    def forward(self, x):
        return self.down_proj(self.activation(self.up_proj(x)))


def train(group) -> None:
    """Outputs, all gradients, and the weights after several steps."""
    size = dist.get_world_size(group)
    for bias, activation in ((True, F.gelu), (False, F.relu)):
        dense = fill(Dense(2 * size, 3 * size, bias, activation))
        options = {"activation": activation, "overlap": bias}
        cut = AllGatherMLP.from_full(dense, group, **options)
        models = (dense, cut)
        optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01) for m in models]
        for step in range(3):
            x, grad = (random_of(n + step, 5, 3, 2 * size) for n in (10, 50))
            inputs = [x.clone().requires_grad_() for _ in models]
            outputs = [model(x) for model, x in zip(models, inputs, strict=True)]
            close(outputs[1], outputs[0], "y")
            for output, optimizer in zip(outputs, optimizers, strict=True):
                optimizer.zero_grad()
                output.backward(grad)
            close(inputs[1].grad, inputs[0].grad, "dX")
            for name, parameter in cut.named_parameters():
                full = dense.get_parameter(name)
                close(parameter.grad, mine(full.grad, 0, group), f"gradient of {name}")
            for optimizer in optimizers:
                optimizer.step()
        for name, parameter in cut.named_parameters():
            close(parameter, mine(dense.get_parameter(name), 0, group), name)


@pytest.mark.verifies(MLP)
@ON_GROUPS
def test_gathering_after_each_layer_computes_the_dense_mlp(world, size, members):
    world(size).run(on_group, members, train)


def refusals() -> None:
    with pytest.raises(ValueError, match="out_features: 7 is not divisible by 2"):
        AllGatherMLP(4, 7)
    with pytest.raises(ValueError, match="Tanh has no up_proj"):
        AllGatherMLP.from_full(nn.Tanh())
    dense = Dense(4, 8, True)
    dense.down_proj = nn.Linear(8, 6)
    with pytest.raises(ValueError, match=r"\[8, 4\] and down_proj \[6, 8\]"):
        AllGatherMLP.from_full(dense)
    dense.down_proj = nn.Linear(8, 4, bias=False)
    with pytest.raises(ValueError, match="has a bias, the other none"):
        AllGatherMLP.from_full(dense)
    with pytest.raises(ValueError, match=r"input \[3, 5\], expected \[..., 4\]"):
        AllGatherMLP(4, 8)(torch.ones(3, 5))


@pytest.mark.verifies(MLP)
def test_sizes_that_do_not_fit_are_refused_on_all_ranks(world):
    world(2).run(refusals)
