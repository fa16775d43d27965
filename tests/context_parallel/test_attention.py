"""Attention over cut sequences, against torch in one process, in float64."""

import pytest
import torch

from tests.context_parallel.attention_cases import dense, errors_of, qkv
from xtrain.context_parallel import flash_attention_backward, flash_attention_forward
from xtrain.context_parallel.block_attention import FUSED_CPU, TILES

BLOCKS = {"tiles": TILES, "fused": None}  # None: the best kernel of the device
RING = [
    ("ring", heads, key_heads, local, causal, balance, blocks, scale)
    for heads, key_heads, local in ((4, 4, 6), (4, 2, 2), (3, 1, 10))
    for causal, balance in (
        (False, "none"), (True, "none"), (True, "striped"), (True, "zigzag"),
    )
    for blocks, scale in (("tiles", None), ("fused", 0.3))
]  # fmt: skip
GATHERED = [("all_gather", *case[1:]) for case in RING]


def ulysses_cases(ranks: int) -> list[tuple]:
    return [
        ("ulysses", ranks * heads, key_heads, 5, causal, "none", "tiles", scale)
        for heads, key_heads in ((1, 1), (2, 2 * ranks), (2, ranks))
        for causal, scale in ((True, None), (False, 0.3))
    ]


def all_cases(cases: list[tuple], ranks: int) -> list[list[float]]:
    return [
        errors_of(
            name, qkv(heads, key_heads, local * ranks), causal, balance, scale,
            block_attention=BLOCKS[blocks],
        )
        for name, heads, key_heads, local, causal, balance, blocks, scale in cases
    ]  # fmt: skip


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.verifies("xtrain.context_parallel.ring_attention:ring_attention")
@pytest.mark.verifies("xtrain.context_parallel.ring_attention:_RingAttention")
@pytest.mark.verifies("xtrain.context_parallel.running_attention:RunningAttention")
@pytest.mark.verifies("xtrain.context_parallel.running_attention:Gradients")
@pytest.mark.verifies("xtrain.context_parallel.running_attention:add_up")
@pytest.mark.verifies("xtrain.context_parallel.balance:block_of")
def test_ring_attention_equals_one_process(world, ranks):
    for errors in world(ranks).run(all_cases, RING, ranks):
        assert max(map(max, errors)) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.verifies(
    "xtrain.context_parallel.all_gather_attention:all_gather_attention"
)
def test_all_gather_attention_equals_one_process(world, ranks):
    for errors in world(ranks).run(all_cases, GATHERED, ranks):
        assert max(map(max, errors)) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.verifies("xtrain.context_parallel.ulysses:ulysses_attention")
@pytest.mark.verifies("xtrain.context_parallel.ulysses:swap")
def test_ulysses_attention_equals_one_process(world, ranks):
    for errors in world(ranks).run(all_cases, ulysses_cases(ranks), ranks):
        assert max(map(max, errors)) < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    ("heads", "key_heads", "length"), [(4, 2, 1), (3, 3, 257), (4, 1, 600)]
)
@pytest.mark.verifies("xtrain.context_parallel.flash:flash_attention_forward")
@pytest.mark.verifies("xtrain.context_parallel.flash:flash_attention_backward")
def test_tiles_equal_torch_and_the_fused_kernel(heads, key_heads, length, causal):
    q, k, v, grad = qkv(heads, key_heads, length, batch=1)
    out, lse = flash_attention_forward(q, k, v, causal)
    found = [out, *flash_attention_backward(grad, q, k, v, out, lse, causal)]
    for ours, torchs in zip(found, dense(q, k, v, grad, causal), strict=True):
        assert (ours - torchs).abs().max() < 1e-12
    fused_out, fused_lse = FUSED_CPU.forward(q, k, v, causal, q.shape[-1] ** -0.5)
    torch.testing.assert_close(out, fused_out, rtol=0, atol=1e-12)
    torch.testing.assert_close(lse, fused_lse, rtol=0, atol=1e-12)
