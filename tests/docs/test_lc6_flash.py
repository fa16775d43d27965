"""Flash attention: what its page shows of tiles, tensors and products."""

import pytest
import torch

from xtrain.context_parallel import flash_attention_backward, flash_attention_forward
from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc6 import flash, runs_flash

FORWARD = "xtrain.context_parallel.flash:flash_attention_forward"
BACKWARD = "xtrain.context_parallel.flash:flash_attention_backward"
TILES = (
    "xtrain.context_parallel.flash:forward_tiles",
    "xtrain.context_parallel.flash:backward_tiles",
)


@pytest.mark.verifies(FORWARD, BACKWARD, *TILES)
def test_tiles_above_the_diagonal_are_skipped_in_both_passes(on_ranks):
    for length, full, causal in ((1100, 25, 15), (256, 1, 1), (257, 4, 3)):
        for masked, tiles in ((False, full), (True, causal)):
            found = flash.computed(length, masked)
            assert len(found["forward"]) == len(found["backward"]) == tiles
    assert flash.flash_tile_counts().rows[0][1:3] == ["4", "3"]
    drawing = flash.flash_tiles()
    assert drawing.count("xt-bar-fill") == 15
    assert drawing.count("<rect") == 25


def test_a_tile_too_many_stops_the_build(on_ranks, monkeypatch):
    found = runs.remembered  # the run without a mask, shown as if it were causal
    monkeypatch.setattr(runs, "remembered", lambda f, n, *a: found(f, n, a[0], False))
    with pytest.raises(EvidenceError, match="causal=True"):
        flash.computed(600, True)


@pytest.mark.verifies(FORWARD, BACKWARD, *TILES)
def test_no_tensor_is_larger_than_a_tile_and_the_log_sum_exp_is_kept(on_ranks):
    rows = flash.flash_memory().rows
    naive, ours = rows[::2], rows[1::2]
    assert len({row[2] for row in ours}) == 1  # the tile, at any length
    assert len({row[2] for row in naive}) == 3


def test_a_larger_tensor_or_more_work_or_more_kept_stops_the_build(
    on_ranks, monkeypatch
):
    right = runs.remembered(runs_flash.counted, 1, "tiles", 512)[0]
    places = flash.computed(512)
    monkeypatch.setattr(flash, "tile_size", lambda length: 256)
    monkeypatch.setattr(flash, "computed", lambda length: places)
    for wrong in (
        {"largest": [10**6, 1]},
        {"flops": [right["flops"][0], right["flops"][1] + 1]},
        {"kept": right["kept"] + 4},
    ):
        monkeypatch.setattr(runs, "remembered", lambda *a, w=wrong: [{**right, **w}])
        with pytest.raises(EvidenceError, match="tiles, 512 tokens"):
            flash.counted("tiles", 512)


@pytest.mark.verifies(FORWARD, BACKWARD, *TILES)
def test_forward_has_two_products_a_tile_and_backward_five(on_ranks):
    rows = flash.flash_products().rows
    assert [row[3] for row in rows] == ["2.00", "2.50"]


@pytest.mark.verifies(FORWARD, BACKWARD)
def test_tiles_are_exact_with_grouped_heads_and_odd_lengths(on_ranks):
    assert len(flash.flash_errors().rows) == 6


def attention(causal):
    """Tensors of an attention, and the whole matrices P and dP by their definitions."""
    q, k, v, grad = torch.randn(4, 1, 2, 300, 8, dtype=torch.float64)
    scores = q @ k.mT * 8**-0.5
    if causal:
        later = torch.ones(300, 300, dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    return q, k, v, grad, scores.softmax(-1), grad @ v.mT


@pytest.mark.verifies(FORWARD, BACKWARD)
@pytest.mark.parametrize("causal", [False, True])
def test_the_sum_of_a_row_needs_the_output_only(causal):
    """rowsum(P * dP) = rowsum(dO * O), and dS = P * (dP - it) gives dQ."""
    q, k, v, grad, P, dP = attention(causal)
    out, lse = flash_attention_forward(q, k, v, causal)
    row = (grad * out).sum(-1, keepdim=True)
    torch.testing.assert_close((P * dP).sum(-1, keepdim=True), row)
    dq, _, dv = flash_attention_backward(grad, q, k, v, out, lse, causal)
    torch.testing.assert_close(dq, P * (dP - row) @ k * 8**-0.5)
    torch.testing.assert_close(dv, P.mT @ grad)


@pytest.mark.verifies(FORWARD, BACKWARD)
@pytest.mark.parametrize("cuts", [[300], [100, 200], [1, 298, 1], [75] * 4])
def test_parts_of_the_keys_give_their_parts_of_the_gradients(cuts):
    """As on a ring: out and lse are those of all keys, a block is of some."""
    q, k, v, grad, *_ = attention(False)
    out, lse = flash_attention_forward(q, k, v, False)
    whole = flash_attention_backward(grad, q, k, v, out, lse, False)
    pairs = zip(k.split(cuts, 2), v.split(cuts, 2), strict=True)
    parts = [flash_attention_backward(grad, q, *kv, out, lse, False) for kv in pairs]
    dq, dk, dv = zip(*parts, strict=True)
    for found, right in zip((sum(dq), torch.cat(dk, 2), torch.cat(dv, 2)), whole,
                            strict=True):  # fmt: skip
        torch.testing.assert_close(found, right)


@pytest.mark.verifies(FORWARD)
def test_probabilities_come_back_from_the_log_sum_exp():
    q, k, v, _, P, _ = attention(False)
    _, lse = flash_attention_forward(q, k, v, False)
    torch.testing.assert_close((q @ k.mT * 8**-0.5 - lse[..., None]).exp(), P)
