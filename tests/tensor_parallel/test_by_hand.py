"""Norms, gates and rotary positions: a backward by hand, against autograd's."""

import pytest
import torch
import torch.nn.functional as F

from xtrain.tensor_parallel.mlp import gated
from xtrain.tensor_parallel.norm import rms_norm
from xtrain.tensor_parallel.rope import apply_rotary, rope_cos_sin


def drawn(*sizes):
    generator = torch.Generator().manual_seed(len(sizes))
    x = torch.randn(*sizes, generator=generator, dtype=torch.float64, device="cpu")
    return x.requires_grad_()


def rotary_by_torch(x, cos, sin):
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


def turning(turn):
    def turned(x):
        positions = torch.arange(x.shape[-2]).expand(len(x), -1) + 3
        return turn(x, *rope_cos_sin(positions, x.shape[-1], dtype=torch.float64))

    return turned


CASES = {
    "norm": (
        lambda x, w: rms_norm(x, w, 1e-5),
        lambda x, w: F.rms_norm(x, w.shape, w, 1e-5),
        [(2, 3, 5), (5,)],
    ),
    "norm, one row": (rms_norm, lambda x, w: F.rms_norm(x, w.shape, w), [(7,), (7,)]),
    "gate": (gated, lambda gate, up: F.silu(gate) * up, [(2, 3, 4), (2, 3, 4)]),
    "rotary": (turning(apply_rotary), turning(rotary_by_torch), [(2, 3, 4, 6)]),
}


@pytest.mark.verifies(
    "xtrain.tensor_parallel.norm:rms_norm",
    "xtrain.tensor_parallel.mlp:gated",
    "xtrain.tensor_parallel.rope:apply_rotary",
)
@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_autograd(name):
    ours, theirs, sizes = CASES[name]
    given = [drawn(*size) for size in sizes]
    out, right = ours(*given), theirs(*given)
    torch.testing.assert_close(out, right, rtol=1e-13, atol=1e-13)
    grad = torch.randn_like(right)
    found = torch.autograd.grad(out, given, grad)
    for mine, other in zip(found, torch.autograd.grad(right, given, grad), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


def test_a_slice_that_is_not_contiguous():
    x = drawn(2, 6, 4, 8).transpose(1, 2)[..., ::2]
    weight = drawn(4)
    torch.testing.assert_close(rms_norm(x, weight), F.rms_norm(x, (4,), weight))
    turned = turning(apply_rotary)(x)
    torch.testing.assert_close(turned, turning(rotary_by_torch)(x))


def test_a_frozen_weight_and_a_frozen_input():
    x, weight = drawn(3, 5), drawn(5)
    (dx,) = torch.autograd.grad(rms_norm(x, weight.detach()).sum(), [x])
    (dw,) = torch.autograd.grad(rms_norm(x.detach(), weight).sum(), [weight])
    both = torch.autograd.grad(F.rms_norm(x, (5,), weight).sum(), [x, weight])
    torch.testing.assert_close((dx, dw), both)


@pytest.mark.parametrize("name", CASES)
def test_second_derivatives_are_those_of_autograd(name):
    found = []
    for function in CASES[name][:2]:
        given = [drawn(*size) for size in CASES[name][2]]
        out = function(*given)
        first = torch.autograd.grad(out.sin().sum(), given, create_graph=True)
        squares = sum(g.square().sum() for g in first)
        found.append(torch.autograd.grad(squares, given))
    torch.testing.assert_close(*found, rtol=1e-11, atol=1e-11)


def test_in_16_bits_positions_are_turned_in_fp32():
    x = drawn(2, 3, 4, 6).detach().bfloat16()
    cos, sin = rope_cos_sin(torch.arange(4) + 1000, 6)
    right = rotary_by_torch(x.float(), cos, sin).bfloat16()
    turned = apply_rotary(x, cos, sin)
    assert turned.dtype == torch.bfloat16
    assert torch.equal(turned, right)


def test_the_gate_keeps_its_two_inputs_alone():
    gate, up, kept = drawn(3, 4), drawn(3, 4), []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t
    )
    with hooks:
        gated(gate, up)
    assert [t.data_ptr() for t in kept] == [gate.data_ptr(), up.data_ptr()]


def test_in_16_bits_a_norm_is_computed_in_fp32():
    x, weight = drawn(3, 8).detach(), drawn(8).detach()
    low = [t.bfloat16().requires_grad_() for t in (x, weight)]
    wide = [t.detach().float().requires_grad_() for t in low]
    out, right = (
        rms_norm(*low),
        F.rms_norm(wide[0], (8,), wide[1], torch.finfo(low[0].dtype).eps),
    )
    assert torch.equal(out, right.bfloat16())
    grad = torch.ones_like(out)
    found = torch.autograd.grad(out, low, grad)
    expected = torch.autograd.grad(right, wide, grad.float())
    for mine, other in zip(found, expected, strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine, other.bfloat16(), rtol=0.01, atol=0.01)
