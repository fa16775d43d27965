"""Attention in tiles: sizes that are no multiple of a tile, precision, gradients."""

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from tests.context_parallel.attention_cases import dense, qkv
from tests.context_parallel.test_counted import Largest
from xtrain.context_parallel import (
    flash_attention_backward,
    flash_attention_forward,
    mask,
)
from xtrain.context_parallel.block_attention import FUSED_CPU, TILES
from xtrain.context_parallel.mask import Tokens, Visible

FLASH = "xtrain.context_parallel.flash"


def tiled(q, k, v, grad, causal, scale=None):
    out, lse = flash_attention_forward(q, k, v, causal, scale)
    return [out, *flash_attention_backward(grad, q, k, v, out, lse, causal, scale)]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("tile", [1, 3, 4, 7, 100])
@pytest.mark.verifies(f"{FLASH}:flash_attention_forward")
@pytest.mark.verifies(f"{FLASH}:flash_attention_backward")
@pytest.mark.verifies("xtrain.context_parallel.mask:up_to_own")
def test_sizes_that_are_no_multiple_of_a_tile(tile, causal, monkeypatch):
    monkeypatch.setattr(mask, "TILE", tile)
    for heads, key_heads, length in ((4, 2, 11), (3, 1, 12), (2, 2, 1)):
        case = qkv(heads, key_heads, length)
        found, expected = tiled(*case, causal, 0.4), dense(*case, causal, 0.4)
        for ours, torchs in zip(found, expected, strict=True):
            assert (ours - torchs).abs().max() < 1e-12


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.verifies(f"{FLASH}:forward_tiles", f"{FLASH}:backward_tiles")
def test_no_tensor_is_larger_than_a_tile_and_forward_has_two_products_and_backward_five(
    causal,
):
    """Tiles above the diagonal are skipped in both passes."""
    tile, dim = mask.TILE, 6
    for sizes in ([tile], [tile, 1], [tile, tile, 88], [tile] * 4):
        q, k, v, grad = qkv(1, 1, sum(sizes), batch=1)
        with Largest() as largest, FlopCounterMode(display=False) as forward:
            out, lse = flash_attention_forward(q, k, v, causal)
        with largest, FlopCounterMode(display=False) as backward:
            flash_attention_backward(grad, q, k, v, out, lse, causal)
        assert largest.elements == max(tile**2, 2 * sum(sizes) * dim)
        pairs = sum(
            rows * keys
            for i, rows in enumerate(sizes)
            for keys in (sizes[: i + 1] if causal else sizes)
        )
        assert forward.get_total_flops() == 2 * 2 * pairs * dim
        assert backward.get_total_flops() == 5 * 2 * pairs * dim


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.verifies(f"{FLASH}:flash_attention_forward")
@pytest.mark.verifies(f"{FLASH}:flash_attention_backward")
def test_in_fewer_bits_tiles_are_as_near_as_torch(dtype):
    case = [t.to(dtype) for t in qkv(4, 2, 700)]
    exact = dense(*(t.double() for t in case), True)
    found, torchs = tiled(*case, True), dense(*case, True)
    assert [t.dtype for t in found] == [dtype] + [torch.float32] * 3
    for ours, other, right in zip(found, torchs, exact, strict=True):
        error, theirs = ((t.double() - right).norm().item() for t in (ours, other))
        assert 0 < error < 1.1 * theirs


@pytest.mark.verifies(f"{FLASH}:forward_tiles", f"{FLASH}:backward_tiles")
@pytest.mark.parametrize("blocks", [TILES, FUSED_CPU], ids=["tiles", "fused"])
def test_a_query_that_sees_nothing_has_zeros_everywhere(blocks):
    q, k, v, grad = qkv(2, 2, 5)
    ids = torch.tensor([[0, 0, -1, 1, 1]]).expand(2, -1)
    tokens = Tokens(torch.arange(5), ids)
    seen = Visible(tokens, tokens, True, None).mask(slice(0, 5), slice(0, 5))
    out, lse = blocks.forward(q, k, v, False, 0.3, seen)
    dq, dk, dv = blocks.backward(grad, q, k, v, out, lse, False, 0.3, seen)
    for of_padding in (out, dq, dk, dv):
        assert (of_padding[:, :, 2] == 0).all() and of_padding.isfinite().all()
        assert (of_padding[:, :, [1, 4]] != 0).any(-1).all()
    assert (lse[:, :, 2] == float("-inf")).all()


def test_flex_attention_has_no_backward_on_a_cpu():
    """If this fails, it may compute blocks with a mask."""
    q = torch.zeros(1, 1, 16, 16, requires_grad=True, device="cpu")
    with pytest.raises(NotImplementedError, match="not support backward on CPU"):
        flex_attention(q, q, q)


@pytest.mark.verifies(f"{FLASH}:checked_scale")
def test_shapes_that_are_not_those_of_attention_are_refused():
    q = torch.zeros(2, 3, 4, 5)
    for k in (q[:, :2], q[0], q[:1], q[..., :4], q[:, :0]):
        with pytest.raises(ValueError, match="heads a multiple of the key heads"):
            flash_attention_forward(q, k, k)
