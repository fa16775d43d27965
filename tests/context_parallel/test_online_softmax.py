"""Online softmax: any order and size of blocks, rows without keys, any scores."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.devices import randn, skip_unless_mistakes_are_told
from xtrain.comm import CommLedger
from xtrain.context_parallel import online_softmax, ring_online_softmax
from xtrain.context_parallel.online_softmax import merge, softmax_block

SOFTMAX = "xtrain.context_parallel.online_softmax"
NONE = float("-inf")


def dense(scores, values):
    """softmax(scores) @ values with zeros for rows without keys, and log-sum-exp."""
    out = torch.softmax(scores, -1).nan_to_num(0.0) @ values
    return out, scores.logsumexp(-1)


def rows(keys: int, seed: int, shift: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    """Scores of ordinary rows, of two that see one half, and of one without keys."""
    generator = torch.Generator().manual_seed(seed)
    scores = 3 * randn(2, 4, keys, generator=generator)
    scores += shift
    scores[:, 1, : keys // 2] = NONE  # its first blocks are hidden
    scores[:, 2] = NONE
    scores[:, 3, keys // 2 :] = NONE
    values = randn(2, keys, 3, generator=generator)
    return scores, values


def close(found, expected, shift: float = 0.0) -> None:
    """Within the rounding of scores of that size."""
    atol = 1e-12 + 1e-14 * abs(shift)
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=0, atol=atol)


@settings(max_examples=40)
@given(
    st.integers(1, 40), st.integers(1, 50), st.integers(0, 99),
    st.sampled_from([0.0, -2e4, 5e4]),
)  # fmt: skip
@pytest.mark.verifies(f"{SOFTMAX}:online_softmax")
def test_any_size_of_blocks_gives_the_same(keys, block_size, seed, shift):
    scores, values = rows(keys, seed, shift)
    found = online_softmax(scores, values, block_size)
    close(found, dense(scores, values), shift)
    assert (found[0][:, 2] == 0).all() and (found[1][:, 2] == NONE).all()


@settings(max_examples=40)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.randoms())
@pytest.mark.verifies(f"{SOFTMAX}:merge", f"{SOFTMAX}:softmax_block")
@pytest.mark.verifies(f"{SOFTMAX}:weights")
def test_any_order_and_any_grouping_of_blocks_gives_the_same(sizes, random):
    scores, values = rows(sum(sizes), len(sizes))
    blocks = [
        softmax_block(s, v)
        for s, v in zip(scores.split(sizes, -1), values.split(sizes, -2), strict=True)
    ]
    random.shuffle(blocks)
    while len(blocks) > 1:  # merge any two neighbours, as if the tree were any tree
        at = random.randrange(len(blocks) - 1)
        blocks[at : at + 2] = [merge(blocks[at], blocks[at + 1])]
    close(blocks[0], dense(scores, values))


@pytest.mark.verifies(f"{SOFTMAX}:online_softmax")
def test_16_bits_are_added_up_in_32():
    scores, values = rows(300, 1)
    exact = dense(scores.bfloat16().double(), values.bfloat16().double())
    out, lse = online_softmax(scores.bfloat16(), values.bfloat16(), 7)
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    torch.testing.assert_close(out, exact[0].bfloat16(), rtol=1e-2, atol=1e-3)
    torch.testing.assert_close(lse.double(), exact[1], rtol=1e-6, atol=1e-5)


@pytest.mark.verifies(f"{SOFTMAX}:online_softmax")
def test_values_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="4 scores a row, but 5 values"):
        online_softmax(torch.zeros(2, 4), torch.zeros(5, 3))
    with pytest.raises(ValueError, match="block_size=0 is below 1"):
        online_softmax(torch.zeros(2, 4), torch.zeros(4, 3), 0)


def ring(counts: list[int]) -> float:
    """Keys cut unevenly over the ranks; some have none."""
    scores, values = rows(sum(counts), 5, shift=-2e4)
    rank = dist.get_rank()
    mine = ring_online_softmax(
        scores.split(counts, -1)[rank], values.split(counts, -2)[rank]
    )
    expected = dense(scores, values)
    return max((a - b).nan_to_num(0.0).abs().max().item()
               for a, b in zip(mine, expected, strict=True))  # fmt: skip


@pytest.mark.parametrize("counts", [[5], [1, 7], [3, 0, 4], [2, 5, 1, 6]])
@pytest.mark.verifies(f"{SOFTMAX}:ring_online_softmax")
def test_a_ring_of_ranks_with_uneven_numbers_of_keys(world, counts):
    assert max(world(len(counts)).run(ring, counts)) < 1e-10


def sent() -> list[int]:
    """Bytes of each message of this rank, for 8 rows and 3 features in float64."""
    scores, values = rows(4, 5)
    with CommLedger() as ledger:
        ring_online_softmax(scores, values)
    return [e.nbytes for e in ledger.events if e.op.strip("_") in ("send", "isend")]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.verifies(f"{SOFTMAX}:ring_online_softmax")
def test_every_rank_sends_its_block_on_in_every_hop(world, ranks):
    block = 8 * (3 + 1) * 8  # output and log-sum-exp
    assert world(ranks).run(sent) == [[block] * (ranks - 1)] * ranks


def wrong_on_one(kind: str) -> str:
    scores, values = rows(4, 5)
    if dist.get_rank() == 1:
        scores = {"rows": scores[:1], "keys": scores[..., :3]}.get(kind, scores)
        values = values.float() if kind == "dtype" else values
        values = None if kind == "tensor" else values
    try:
        ring_online_softmax(scores, values)
    except ValueError as error:
        told = str(error)
        ring_online_softmax(*rows(3, 5))
        return told
    return ""


@pytest.mark.parametrize("kind", ["rows", "keys", "dtype", "tensor"])
@pytest.mark.verifies(f"{SOFTMAX}:check_online_softmax")
def test_a_ring_in_which_one_rank_is_wrong_is_refused_on_all(
    world, xtrain_worlds, kind
):
    skip_unless_mistakes_are_told(xtrain_worlds)
    for told in world(2).run(wrong_on_one, kind):
        assert "ring_online_softmax" in told and kind in told
