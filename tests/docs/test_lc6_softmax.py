"""Online softmax: any blocks in any order, rows that see nothing, a ring; its page."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtrain.context_parallel import online_softmax, ring_online_softmax
from xtrain.context_parallel.online_softmax import merge, softmax_block
from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc6 import runs_softmax, softmax

ONLINE = "xtrain.context_parallel.online_softmax:online_softmax"
RING = "xtrain.context_parallel.online_softmax:ring_online_softmax"
BLOCK = "xtrain.context_parallel.online_softmax:softmax_block"
MERGE = "xtrain.context_parallel.online_softmax:merge"
WEIGHTS = "xtrain.context_parallel.online_softmax:weights"
HIDDEN = float("-inf")


def drawn(seed, rows, keys, share_hidden=0.0):
    """Scores and values in float64; some scores hide their key."""
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(rows, keys, generator=generator, dtype=torch.float64)
    hidden = torch.rand(rows, keys, generator=generator) < share_hidden
    values = torch.randn(keys, 3, generator=generator, dtype=torch.float64)
    return scores.masked_fill(hidden, HIDDEN), values


def softmax_of(scores, values):
    """torch's, where a row that sees nothing is zero."""
    return scores.softmax(-1).nan_to_num(0.0) @ values, scores.logsumexp(-1)


def close(found, right):
    for a, b in zip(found, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.verifies(ONLINE, BLOCK, MERGE, WEIGHTS)
@given(st.integers(0, 10_000), st.integers(1, 17), st.integers(1, 20))
def test_blocks_of_any_size_give_softmax(seed, keys, size):
    for share_hidden in (0.0, 0.7):
        scores, values = drawn(seed, 3, keys, share_hidden)
        close(online_softmax(scores, values, size), softmax_of(scores, values))


@pytest.mark.verifies(BLOCK, MERGE)
@given(st.integers(0, 10_000), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_blocks_in_any_order_give_softmax(seed, sizes):
    scores, values = drawn(seed, 2, sum(sizes), 0.4)
    pairs = zip(scores.split(sizes, -1), values.split(sizes), strict=True)
    blocks = [softmax_block(*pair) for pair in pairs]
    for order in itertools.permutations(blocks):
        state = None
        for block in order:
            state = merge(state, block)
        close(state, softmax_of(scores, values))


@pytest.mark.verifies(MERGE)
def test_two_halves_of_blocks_may_be_merged_in_turn():
    """As a tree would: what was merged is a block like any other."""
    scores, values = drawn(0, 4, 12)
    pairs = zip(scores.split(3, -1), values.split(3), strict=True)
    a, b, c, d = (softmax_block(*pair) for pair in pairs)
    close(merge(merge(a, b), merge(c, d)), softmax_of(scores, values))


@pytest.mark.verifies(ONLINE, WEIGHTS)
@pytest.mark.parametrize("hidden", [slice(0, 4), slice(4, 8), slice(0, 8), slice(2, 7)])
def test_a_row_may_see_nothing_of_a_block_or_nothing_at_all(hidden):
    scores, values = drawn(1, 3, 8)
    scores[1, hidden] = HIDDEN
    output, lse = online_softmax(scores, values, 4)
    close((output, lse), softmax_of(scores, values))
    assert output.isfinite().all()
    assert bool(lse[1] == HIDDEN) == (hidden == slice(0, 8))


@pytest.mark.verifies(ONLINE)
@pytest.mark.parametrize("level", [-2e4, 2e4])
def test_scores_may_all_be_very_low_or_very_high(level):
    scores, values = drawn(2, 3, 9)
    close(online_softmax(scores + level, values, 2),
          softmax_of(scores + level, values))  # fmt: skip


@pytest.mark.verifies(ONLINE)
def test_16_bit_scores_are_summed_in_fp32():
    scores, values = (t.bfloat16() for t in drawn(3, 2, 4096))
    output, lse = online_softmax(scores, values, 64)
    right = softmax_of(scores.double(), values.double())
    assert (output.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(lse.double(), right[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(output.double(), right[0], rtol=4e-3, atol=1e-3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [((3, 4, 2), "3 scores a row, but 4 values"), ((4, 4, 0), "block_size=0")],
)
def test_what_does_not_fit_is_refused(arguments, words):
    keys, values, size = arguments
    with pytest.raises(ValueError, match=words):
        online_softmax(torch.zeros(2, keys), torch.zeros(values, 3), size)


def on_a_ring(hide):
    """Errors of this rank, whose keys differ in number, and its lse."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    counts = list(range(1, size + 1))
    scores, values = drawn(4, 3, sum(counts))
    scores[0, : counts[0] + 1] = HIDDEN  # all of rank 0's, and one of rank 1's
    if hide:
        scores[2] = HIDDEN
    mine = scores.split(counts, -1)[rank], values.split(counts)[rank]
    pairs = zip(ring_online_softmax(*mine), softmax_of(scores, values), strict=True)
    return [bool(torch.allclose(a, b, rtol=1e-12, atol=1e-12)) for a, b in pairs]


@pytest.mark.verifies(RING)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_ring_gives_softmax_on_every_rank(world, ranks):
    for hide in (False, True):
        assert world(ranks).run(on_a_ring, hide) == [[True, True]] * ranks


# ------------------------------------------------------------------- the page


@pytest.mark.verifies(ONLINE)
def test_the_picture_shows_the_states_of_the_run(on_ranks):
    drawing = softmax.softmax_weights()
    steps = softmax.recorded_steps()
    assert [round(sum(step["weights"]), 12) for step in steps] == [1, 1, 1]
    for step in steps:
        assert f"lse {step['lse']:.2f}" in drawing
    assert drawing.count("<rect") == 3 + 6 + 9
    last = softmax.softmax_steps().rows[-1]
    assert math.isclose(float(last[-1]) + float(last[-2]), 1, abs_tol=2e-3)


def test_a_state_that_is_not_softmax_stops_the_build(on_ranks, monkeypatch):
    steps = runs.remembered(runs_softmax.steps, 1)[0]
    steps[1]["weights"][0] += 1e-6
    monkeypatch.setattr(runs, "remembered", lambda *arguments: [steps])
    with pytest.raises(EvidenceError, match="after block 2"):
        softmax.recorded_steps()


@pytest.mark.verifies(ONLINE, WEIGHTS)
def test_rows_that_see_little_are_right_and_other_starts_fail(on_ranks):
    rows = {row[0]: row[1:] for row in softmax.softmax_hidden_rows().rows}
    bad = "**NaN**"
    assert rows["its first block is hidden"][2] == bad
    assert rows["sees no key"][0] == "0.0000"
    assert rows["sees no key"][1:3] == [bad, bad]
    assert rows["all scores are very low"][3] == bad
    assert bad not in [row[0] for row in rows.values()]


@pytest.mark.verifies(RING)
def test_the_ring_is_one_every_rank_sends_every_hop(on_ranks):
    assert [row[0] for row in softmax.ring_softmax_bytes().rows] == ["2", "3", "4"]
    seen = softmax.ring_softmax_seen(4).rows
    assert seen[0][1:] == ["0", "1", "2", "3"]
    assert set(seen[-1][1:]) == {"0 1 2 3"}
