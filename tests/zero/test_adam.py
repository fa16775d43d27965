"""Adam and AdamW step for step beside torch's."""

import copy

import pytest
import torch
from torch import nn

from xtrain.zero import Adam, AdamW

TWINS = {"Adam": (Adam, torch.optim.Adam), "AdamW": (AdamW, torch.optim.AdamW)}
OPTIONS = [
    {},
    {"lr": 0.03, "weight_decay": 0.2},
    {"amsgrad": True, "weight_decay": 0.1, "betas": (0.8, 0.95)},
    {"maximize": True, "weight_decay": 0.05, "eps": 1e-6},
    {"amsgrad": True, "maximize": True, "lr": 0.01},
]


def parameters(dtype):
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(s, dtype=dtype)) for s in [(5, 3), (7,), (), (0,)]]


def train(optimizer_class, dtype, steps, options):
    params = parameters(dtype)
    groups = [
        {"params": params[:2]},
        {"params": params[2:], "lr": 0.02, "weight_decay": 0.3, "betas": (0.7, 0.9)},
    ]
    optimizer = optimizer_class(groups, **options)
    generator = torch.Generator().manual_seed(1)
    for step in range(steps):
        for number, parameter in enumerate(params):
            scale = 10.0 ** (step % 5 - 3)  # large and small gradients take turns
            parameter.grad = scale * torch.randn(
                parameter.shape, generator=generator, dtype=dtype, device="cpu"
            )
            if number == 1 and step % 3 == 0:
                parameter.grad = None  # its own step count stays behind
        optimizer.step()
    return params, optimizer


def compare(ours_class, torch_class, options):
    """Weights and state after a hundred steps."""
    for dtype, tolerance in ((torch.float64, 1e-13), (torch.float32, 2e-6)):
        close = {"rtol": tolerance, "atol": tolerance}
        ours, our_optimizer = train(ours_class, dtype, 100, options)
        theirs, their_optimizer = train(torch_class, dtype, 100, options)
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, **close)
            state, torch_state = our_optimizer.state[mine], their_optimizer.state[other]
            assert state.keys() == torch_state.keys()
            for key, value in state.items():
                torch.testing.assert_close(value, torch_state[key], **close)


@pytest.mark.verifies("xtrain.zero.adam:Adam", "xtrain.zero.adam:AdamW")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", TWINS)
def test_a_hundred_steps_equal_torch(name, options):
    compare(*TWINS[name], options)


@pytest.mark.verifies("xtrain.zero.adam:Adam")
def test_the_moments_are_kept():
    """With a constant gradient every step is lr * sign, from the first to the last.

    Moments that begin anew in each step would make it 0.48 lr at the tenth.
    """
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.float64))
    optimizer = Adam([parameter], lr=0.1, eps=0)
    for step in range(1, 30):
        parameter.grad = torch.tensor([3.0, -0.001], dtype=torch.float64)
        optimizer.step()
        expected = torch.tensor([-0.1, 0.1], dtype=torch.float64) * step
        torch.testing.assert_close(parameter.detach(), expected)


@pytest.mark.verifies("xtrain.zero.adam:AdamW")
def test_state_goes_to_torch_and_back():
    ours, optimizer = train(AdamW, torch.float64, 7, {"amsgrad": True})
    twins = [nn.Parameter(p.detach().clone()) for p in ours]
    groups = [{"params": twins[:2]}, {"params": twins[2:]}]
    torchs = torch.optim.AdamW(groups, amsgrad=True)
    torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    back = AdamW([{"params": ours[:2]}, {"params": ours[2:]}])
    back.load_state_dict(copy.deepcopy(torchs.state_dict()))
    for _ in range(3):
        for mine, other in zip(ours, twins, strict=True):
            mine.grad = torch.ones_like(mine)
            other.grad = torch.ones_like(other)
        back.step()
        torchs.step()
    for mine, other in zip(ours, twins, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-13)


@pytest.mark.verifies("xtrain.zero.adam:AdamW")
def test_weight_decay_of_adamw_does_not_depend_on_the_gradient():
    decayed = []
    for scale in (1.0, 1000.0):
        parameter = nn.Parameter(torch.ones(1, dtype=torch.float64))
        parameter.grad = torch.full_like(parameter, scale)
        AdamW([parameter], lr=0.1, weight_decay=0.5).step()
        decayed.append(parameter.item())
    assert decayed[0] == pytest.approx(decayed[1], abs=1e-8)
    assert decayed[0] == pytest.approx(1 - 0.1 * 0.5 - 0.1, abs=1e-8)


@pytest.mark.verifies("xtrain.zero.adam:Adam", "xtrain.zero.adam:AdamW")
def test_a_closure_and_bad_options():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = Adam([parameter])

    def closure():
        optimizer.zero_grad()
        loss = parameter.square().sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 1.0
    assert parameter.item() < 1
    for wrong in (
        {"lr": -1.0},
        {"betas": (0.9, 1.0)},
        {"eps": -1},
        {"weight_decay": -1},
    ):
        with pytest.raises(ValueError, match=r"must not be negative|must lie"):
            AdamW([parameter], **wrong)
