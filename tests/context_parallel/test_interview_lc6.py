"""Claims of the interview page of lc6, each run with and without its cause."""

import pytest
import torch
import torch.nn.functional as F

from tests.devices import randn
from xtrain.context_parallel import (
    flash_attention_backward,
    flash_attention_forward,
    ring_attention,
    ulysses_attention,
)
from xtrain.context_parallel.online_softmax import merge, softmax_block, weights
from xtrain.plan import context_bytes
from xtrain_docs.lectures.lc6 import runs_interview
from xtrain_docs.lectures.lc6.runs_compare import error, inputs, sent, with_gradients

RING = "xtrain.context_parallel.ring_attention:ring_attention"
FLASH = "xtrain.context_parallel.flash"
ULYSSES = "xtrain.context_parallel.ulysses"
MERGE = "xtrain.context_parallel.online_softmax:merge"


@pytest.fixture(autouse=True)
def on_gloo(xtrain_worlds):
    """Skip elsewhere: these are small runs of gloo on CPUs."""
    if xtrain_worlds.device != "cpu" or xtrain_worlds.backend != "gloo":
        pytest.skip("runs of gloo on CPUs")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


def one_process(q, k, v, grad):
    """dQ, dK, dV of attention without a mask, by torch."""
    return with_gradients(F.scaled_dot_product_attention, q, k, v, grad)[1:]


def far(found, expected):
    assert (found - expected).norm() > 0.05 * expected.norm()


# ------------------------------------------------------- q81: how the state is updated


def updated(scores, values, block: int, rescale=True, start=float("-inf")):
    """Output and lse by the textbook rule; without rescaling: the mistake."""
    largest = scores.new_full(scores.shape[:1], start)
    total, out = torch.zeros(len(scores)), torch.zeros(len(scores), values.shape[1])
    total, out = total.double(), out.double()
    for s, v in zip(scores.split(block, 1), values.split(block), strict=True):
        higher = torch.maximum(largest, s.amax(1))
        factor = torch.exp(largest - higher) if rescale else torch.ones_like(higher)
        p = torch.exp(s - higher[:, None])
        total = total * factor + p.sum(1)
        out = out * factor[:, None] + p @ v
        largest = higher
    return out / total[:, None], largest + total.log()


def test_sum_and_output_are_rescaled_when_the_maximum_rises():
    generator = torch.Generator().manual_seed(1)
    scores = 4 * randn(5, 12, generator=generator)
    values = randn(12, 3, generator=generator)
    for block in (1, 5, 12):
        out, lse = updated(scores, values, block)
        close(out, scores.softmax(1) @ values)
        close(lse, scores.logsumexp(1))
    far(updated(scores, values, 4, rescale=False)[0], scores.softmax(1) @ values)


# -------------------------------------------------------------- q82: backward of a ring


@pytest.mark.verifies(f"{FLASH}:flash_attention_backward")
def test_backward_of_a_block_needs_lse_and_out_of_all_keys():
    """Keys in two blocks: with the state of all keys their gradients are right."""
    q, k, v, grad = inputs(2, 2, 8)
    out, lse = flash_attention_forward(q, k, v, causal=False)
    expected = one_process(q, k, v, grad)

    def two_blocks(state):
        dq, dkv = 0, []
        for keys in (slice(0, 3), slice(3, 8)):
            own = k[:, :, keys], v[:, :, keys]
            found = flash_attention_backward(grad, q, *own, *state(*own), causal=False)
            dq = dq + found[0]
            dkv.append(found[1:])
        return [dq, *(torch.cat(parts, 2) for parts in zip(*dkv, strict=True))]

    right = two_blocks(lambda keys, values: (out, lse))
    for found, reference in zip(right, expected, strict=True):
        close(found, reference)
    alone = two_blocks(lambda *own: flash_attention_forward(q, *own, causal=False))
    for found, reference in zip(alone, expected, strict=True):
        far(found, reference)


def test_without_the_exponential_gradients_are_wrong():
    q, k, v, grad = (t[0, 0] for t in inputs(1, 1, 8))
    scores = q @ k.T * 8**-0.5
    p = (scores - scores.logsumexp(1, keepdim=True)).exp()
    expected = one_process(*(t[None, None] for t in (q, k, v, grad)))

    def gradients(p):
        d = (grad * (p @ v)).sum(1, keepdim=True)
        ds = p * (grad @ v.T - d) * 8**-0.5
        return ds @ k, ds.T @ q, p.T @ grad

    for found, reference in zip(gradients(p), expected, strict=True):
        close(found, reference[0, 0])
    wrong = gradients(scores - scores.logsumexp(1, keepdim=True))
    for found, reference in zip(wrong, expected, strict=True):
        far(found, reference[0, 0])


@pytest.mark.verifies(RING)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_messages_of_a_ring_are_posted_before_the_block_is_computed(world, ranks):
    """Forward N - 1 rotations; backward those, and N that bring dK and dV home."""
    for forward, backward in world(ranks).run(runs_interview.posted_before_blocks, 4):
        if ranks == 1:  # with itself, if at all
            assert forward[-1] == 0
            continue
        rotations = [min(step + 1, ranks - 1) for step in range(ranks)]
        assert forward == [*rotations, ranks - 1]
        sums = list(range(ranks))
        both = [a + b for a, b in zip(rotations, sums, strict=True)]
        assert backward == [*both, 2 * ranks - 1]


@pytest.mark.verifies(RING)
def test_a_block_is_computed_while_the_next_keys_have_not_come(world):
    """Rank 0 lets its keys go only when rank 1 has begun its first block."""
    found = world(3).run(runs_interview.computed_before_arrival, 4, timeout=30.0)
    assert found == [1, 1, 1]


# ------------------------------------------- q84, q89: a model around the attention


@pytest.mark.verifies(RING)
@pytest.mark.parametrize("balance", ["none", "striped", "zigzag"])
def test_a_model_on_cut_sequences_needs_global_positions_counts_and_sums(
    world, balance
):
    for change in runs_interview.CHANGES:
        found = world(4).run(runs_interview.error_of_model, change, 32, balance)
        for loss, gradient in found:
            if change == runs_interview.CHANGES[0]:
                assert max(loss, gradient) < 1e-12
            else:
                assert gradient > 0.02, change


# ------------------------------------------------------------- q86: Ulysses or a ring


def refused(name: str, heads: int) -> str:
    """What a rank says to these heads; "" if it computes."""
    attention = {"ring": ring_attention, "ulysses": ulysses_attention}[name]
    q = torch.zeros(1, heads, 4, 8)
    try:
        attention(q, q, q)
    except ValueError as problem:
        return str(problem)
    return ""


@pytest.mark.verifies(f"{ULYSSES}:ulysses_attention")
def test_ulysses_is_limited_by_the_heads_and_a_ring_is_not(world):
    for said in world(4).run(refused, "ulysses", 6):
        assert "6 heads on 4 ranks" in said
    assert world(4).run(refused, "ulysses", 8) == [""] * 4
    assert world(4).run(refused, "ring", 1) == [""] * 4


def test_forward_a_ring_and_an_all_gather_send_the_same(world):
    for key_heads in (8, 2):
        ring, gathered = (
            world(4).run(sent, way, 8, key_heads, 4) for way in ("ring", "all_gather")
        )
        assert [one[0] for one in ring] == [one[0] for one in gathered]
        assert all(a[1] > b[1] for a, b in zip(ring, gathered, strict=True))


def test_with_few_key_heads_a_ring_sends_less_than_ulysses(world):
    found = {
        (way, key_heads): world(4).run(sent, way, 8, key_heads, 4)[0][0]
        for way in ("ring", "ulysses")
        for key_heads in (8, 1)
    }
    assert found["ring", 8] == 2 * found["ulysses", 8]
    assert found["ring", 1] < found["ulysses", 1] / 2
    # with more ranks Ulysses falls and a ring does not
    of_a_rank = [
        [context_bytes(way, 1024 // n, 32, 32, 128, n)[0] for n in (2, 8, 32)]
        for way in ("ring", "ulysses")
    ]
    assert of_a_rank[0] == sorted(of_a_rank[0])
    assert of_a_rank[1] == sorted(of_a_rank[1], reverse=True)


@pytest.mark.verifies(f"{ULYSSES}:swap")
@pytest.mark.verifies(
    "xtrain.context_parallel.all_gather_attention:all_gather_attention"
)
def test_three_ways_give_what_one_process_gives(world):
    for way in ("ring", "all_gather", "ulysses"):
        for heads, key_heads in ((8, 8), (8, 2)):
            assert max(world(4).run(error, way, heads, key_heads, 3)) < 1e-12


# --------------------------------------------------------- q87, q88: merging, and masks


@pytest.mark.verifies(MERGE)
def test_parts_are_merged_by_lse_and_not_by_their_mean():
    q, k, v, _ = inputs(2, 2, 12)
    parts = [
        flash_attention_forward(q, k[:, :, keys], v[:, :, keys], causal=False)
        for keys in (slice(0, 4), slice(4, 12))
    ]
    expected = flash_attention_forward(q, k, v, causal=False)
    for found, reference in zip(merge(*parts), expected, strict=True):
        close(found, reference)
    share = torch.sigmoid(parts[0][1] - parts[1][1]).unsqueeze(-1)
    close(share * parts[0][0] + (1 - share) * parts[1][0], expected[0])
    far((parts[0][0] + parts[1][0]) / 2, expected[0])


@pytest.mark.verifies(MERGE)
@pytest.mark.verifies("xtrain.context_parallel.online_softmax:weights")
def test_a_row_that_sees_nothing_gives_zeros_and_without_the_guard_nan():
    nothing = torch.full((2, 3), float("-inf"), dtype=torch.float64)
    values = torch.randn(3, 4, dtype=torch.float64)
    empty = softmax_block(nothing, values)
    assert torch.equal(empty[0], torch.zeros(2, 4, dtype=torch.float64))
    assert (empty[1] == float("-inf")).all()
    block = softmax_block(torch.randn(2, 3, dtype=torch.float64), values)
    for first, second in ((empty, block), (block, empty)):
        for found, reference in zip(merge(first, second), block, strict=True):
            close(found, reference)
    assert not merge(empty, empty)[0].isnan().any()
    assert torch.exp(empty[1] - empty[1]).isnan().all()  # e^(-inf - -inf)
    assert torch.equal(weights(empty[1], empty[1]), torch.zeros_like(empty[1]))


def test_a_state_that_starts_at_a_large_negative_number_gives_nan_below_it():
    generator = torch.Generator().manual_seed(2)
    low = randn(1, 4, generator=generator) - 2e4
    values = randn(4, 3, generator=generator)
    expected = low.softmax(1) @ values
    close(updated(low, values, 2)[0], expected)
    out, _ = updated(low, values, 2, start=-1e4)
    assert out.isnan().all()
