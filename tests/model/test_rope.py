"""Rotary positions: what they are for, and Llama 3.1's frequencies."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.model import reference
from tests.model.configs import STRETCHED, config_of
from xtrain.model import RopeScaling
from xtrain.tensor_parallel.rope import apply_rotary, rope_cos_sin

SYMBOLS = (
    "xtrain.tensor_parallel.rope:rope_cos_sin",
    "xtrain.tensor_parallel.rope:apply_rotary",
)


def rotated(x, positions, **options):
    angles = rope_cos_sin(positions, x.shape[-1], dtype=torch.float64, **options)
    return apply_rotary(x, *angles)


@pytest.mark.verifies(*SYMBOLS)
@settings(max_examples=30)
@given(
    first=st.integers(0, 10**5),
    second=st.integers(0, 10**5),
    shift=st.integers(-(10**5), 10**5),
    pairs=st.integers(1, 8),
)
def test_a_score_depends_on_the_distance_only(first, second, shift, pairs):
    torch.manual_seed(pairs)
    q, k = torch.randn(2, 1, 1, 1, 2 * pairs, dtype=torch.float64)

    def score(a, b):
        return (rotated(q, torch.tensor([a])) * rotated(k, torch.tensor([b]))).sum()

    torch.testing.assert_close(
        score(first, second), score(first + shift, second + shift), atol=1e-9, rtol=0
    )


@pytest.mark.verifies("xtrain.tensor_parallel.rope:scale_frequencies")
def test_three_kinds_of_frequencies_of_llama_3_1():
    config = config_of("Llama 3.1", rope_theta=1000.0)
    plain = reference.frequencies(config_of("as many key heads", rope_theta=1000.0))
    scaled = reference.frequencies(config)
    assert scaled[0] == plain[0]  # fast: kept
    assert plain[1] / STRETCHED.factor < scaled[1] < plain[1]  # on the ramp
    assert scaled[2] == plain[2] / STRETCHED.factor  # slow
    one = torch.tensor([1])
    cos, sin = rope_cos_sin(one, 6, 1000.0, STRETCHED, torch.float64)
    torch.testing.assert_close(torch.atan2(sin, cos)[0].tolist(), scaled)


@pytest.mark.verifies("xtrain.tensor_parallel.rope:scale_frequencies")
def test_the_scaling_of_llama_3_1_itself():
    """Head size 128, base 500000, 8192 positions stretched by 8: 29 pairs stay as they
    are (wavelength under 2048), 35 are slowed down fully (over 8192)."""
    theta, scaling = 500_000.0, RopeScaling()
    one = torch.tensor([1])
    angles = [
        torch.atan2(*reversed(rope_cos_sin(one, 128, theta, how, torch.float64)))[0]
        for how in (None, scaling)
    ]
    ratios = angles[1] / angles[0]
    wavelengths = 2 * math.pi / angles[0]
    assert torch.equal(ratios == 1, wavelengths < 2048)
    torch.testing.assert_close(
        ratios[wavelengths > 8192], torch.full_like(ratios[wavelengths > 8192], 1 / 8)
    )
    between = ratios[(wavelengths >= 2048) & (wavelengths <= 8192)]
    assert len(between) > 1
    assert torch.all(between.diff() < 0)


@pytest.mark.verifies("xtrain.tensor_parallel.rope:apply_rotary")
def test_16_bit_inputs_are_turned_in_fp32():
    """Rounded once, at the end."""
    torch.manual_seed(0)
    x = torch.randn(1, 2, 64, 8).bfloat16()
    cos, sin = rope_cos_sin(torch.arange(64), 8)
    exact = apply_rotary(x.double(), cos.double(), sin.double())
    found = apply_rotary(x, cos, sin)
    assert found.dtype == torch.bfloat16
    off = (found.double() - exact).abs()
    assert torch.all(off <= exact.abs() * 2**-8 + 1e-6)
