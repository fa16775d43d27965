"""Claims of the interview page of lc6, each run with and without its cause."""

import pytest
import torch
import torch.distributed as dist

from tests.context_parallel.attention_cases import dense, qkv
from tests.devices import randn
from xtrain.cluster.per_rank import replaced
from xtrain.comm.ring_pass import RingPass
from xtrain.context_parallel import (
    flash_attention_forward,
    ring_attention,
    ulysses_attention,
)
from xtrain.context_parallel.block_attention import TILES, BlockAttention
from xtrain.context_parallel.online_softmax import merge, softmax_block, weights
from xtrain.plan import context_bytes

RING = "xtrain.context_parallel.ring_attention:ring_attention"
ULYSSES = "xtrain.context_parallel.ulysses"
MERGE = "xtrain.context_parallel.online_softmax:merge"


@pytest.fixture(autouse=True)
def on_gloo(xtrain_worlds):
    """Skip elsewhere: these are small runs of gloo on CPUs."""
    if xtrain_worlds.device != "cpu" or xtrain_worlds.backend not in (
        "gloo",
        "xtrain-virtual",
    ):
        pytest.skip("runs of gloo on CPUs")


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-11)


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


def test_without_the_exponential_gradients_are_wrong():
    q, k, v, grad = (t[0, 0] for t in qkv(1, 1, 8))
    scores = q @ k.T * 6**-0.5
    p = (scores - scores.logsumexp(1, keepdim=True)).exp()
    expected = dense(*(t[None, None] for t in (q, k, v, grad)), False)[1:]

    def gradients(p):
        d = (grad * (p @ v)).sum(1, keepdim=True)
        ds = p * (grad @ v.T - d) * 6**-0.5
        return ds @ k, ds.T @ q, p.T @ grad

    for found, reference in zip(gradients(p), expected, strict=True):
        close(found, reference[0, 0])
    wrong = gradients(scores - scores.logsumexp(1, keepdim=True))
    for found, reference in zip(wrong, expected, strict=True):
        far(found, reference[0, 0])


def computed_before_arrival() -> int:
    """Rank 0 sends its keys only after rank 1 says that it is computing.

    A rank that waits for keys before it computes would wait forever.

    Returns:
        Blocks that rank 1 had begun when the first message from rank 0 left.
    """
    rank = dist.get_rank()
    aside = dist.new_group()
    begun = torch.zeros(1)
    said: list[torch.Tensor] = []

    def forward(*args):
        begun.add_(1)
        if rank == 1 and begun == 1:
            dist.send(begun, 0, group=aside)
        return TILES.forward(*args)

    def hook(ring, x, by=1):
        if rank == 0 and not said:
            said.append(torch.zeros(1))
            dist.recv(said[0], 1, group=aside)
        return pass_on(ring, x, by)

    pass_on = RingPass.pass_on
    with replaced(RingPass, "pass_on", hook):
        q, k, v, _ = qkv(2, 2, 4)
        ring_attention(
            q, k, v, False, block_attention=BlockAttention(forward, TILES.backward)
        )
    dist.destroy_process_group(aside)
    return int(said[0]) if rank == 0 else 1


@pytest.mark.verifies(RING)
def test_a_block_is_computed_while_the_next_keys_have_not_come(world):
    """Rank 0 lets its keys go only when rank 1 has begun its first block."""
    found = world(3).run(computed_before_arrival)
    assert found == [1, 1, 1]


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


# Bytes of real runs are these: `test_what_sockets_send_is_the_formula`.


def test_forward_a_ring_and_an_all_gather_send_the_same():
    for key_heads in (8, 2):
        ring, gathered = (
            context_bytes(way, 4, 8, key_heads, 8, 4) for way in ("ring", "all_gather")
        )
        assert ring[0] == gathered[0]
        assert ring[1] > gathered[1]


def test_with_few_key_heads_a_ring_sends_less_than_ulysses():
    found = {
        (way, key_heads): context_bytes(way, 4, 8, key_heads, 8, 4)[0]
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


# --------------------------------------------------------- q87, q88: merging, and masks


@pytest.mark.verifies(MERGE)
def test_parts_are_merged_by_lse_and_not_by_their_mean():
    q, k, v, _ = qkv(2, 2, 12)
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
