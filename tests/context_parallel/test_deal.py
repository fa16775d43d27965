"""Documents dealt one by one: every token once, even work, and what is refused."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from xtrain.context_parallel import Deal, deal_documents
from xtrain.context_parallel.balance import check_balance, positions_of

DEAL = "xtrain.context_parallel.deal:deal_documents"
lengths_and_ranks = st.tuples(
    st.lists(st.integers(1, 40), min_size=1, max_size=8), st.sampled_from([1, 2, 3, 8])
)


def packed(lengths: list[int], ranks: int) -> torch.Tensor:
    """Ids of documents of these lengths, and padding to a length that can be cut."""
    lengths = [*lengths, -sum(lengths) % (2 * ranks)]
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return torch.where(ids == len(lengths) - 1, -1, ids)


def pairs_seen(ids: torch.Tensor) -> torch.Tensor:
    """Of each query, the keys of its document up to itself, counted one by one."""
    causal = torch.ones(len(ids), len(ids)).bool().tril()
    return (causal & (ids == ids[:, None]) & (ids >= 0)).sum(1)


def uneven(ids: torch.Tensor, ranks: int, balance) -> float:
    """Pairs of the rank that computes most, over the mean."""
    seen, local = pairs_seen(ids), len(ids) // ranks
    work = [seen[positions_of(r, ranks, local, balance)].sum() for r in range(ranks)]
    return (max(work) / (sum(work) / ranks)).item()


@given(lengths_and_ranks)
@pytest.mark.verifies(DEAL, "xtrain.context_parallel.deal:Deal")
def test_every_rank_has_its_share_of_every_document(drawn):
    lengths, ranks = drawn
    ids = packed(lengths, ranks)
    deal = deal_documents(ids, ranks)
    assert deal.positions.shape == (ranks, len(ids) // ranks)
    assert torch.equal(deal.positions.flatten().sort().values, torch.arange(len(ids)))
    for mine in deal.positions:
        assert all(a < b for a, b in pairwise(mine.tolist()))  # triangles are local
    for document, length in enumerate(lengths):
        held = (ids[deal.positions] == document).sum(1)
        assert held.max() - held.min() <= 2, (length, held)


@given(lengths_and_ranks)
@pytest.mark.verifies(DEAL)
def test_the_work_of_ranks_differs_by_the_tokens_that_are_left_over(drawn):
    """In a document these see fewer than 2N keys each; the rest is exactly even."""
    lengths, ranks = drawn
    ids = packed(lengths, ranks)
    by_rank = pairs_seen(ids)[deal_documents(ids, ranks).positions].sum(1)
    assert by_rank.max() - by_rank.min() <= 2 * (2 * ranks) * len(lengths)


@pytest.mark.parametrize("ranks", [2, 4, 8])
@pytest.mark.verifies(DEAL)
def test_work_is_even_over_drawn_documents_where_zigzag_is_far_off(ranks):
    generator = torch.Generator().manual_seed(0)
    zigzags = []
    for _ in range(10):
        drawn = torch.randn(12, generator=generator, device="cpu").exp() * 100 + 1
        ids = packed(drawn.long().tolist(), ranks)
        zigzags.append(uneven(ids, ranks, "zigzag"))
        assert uneven(ids, ranks, deal_documents(ids, ranks)) < 1.01
        assert uneven(ids, ranks, "striped") < 1.06
    assert sum(zigzags) / len(zigzags) > 1.2, zigzags


@pytest.mark.verifies(DEAL)
def test_a_batch_is_dealt_by_the_documents_of_all_its_sequences():
    first, second = torch.arange(48) // 24, torch.arange(48) // 16
    deal = deal_documents(torch.stack([first, second]), 2)
    for ids in (first, second):
        seen = pairs_seen(ids)[deal.positions].sum(1)
        assert seen[0] == seen[1]


@pytest.mark.verifies(DEAL, "xtrain.context_parallel.deal:Deal")
@pytest.mark.verifies("xtrain.context_parallel.balance:check_balance")
def test_what_is_no_deal_is_refused():
    with pytest.raises(ValueError, match="evenly: pad it to 12"):
        deal_documents(torch.zeros(10, dtype=torch.int64), 4)
    for wrong in ([[0, 1], [1, 2]], [0, 1], [[0.0, 1.0]]):
        with pytest.raises(ValueError, match="together each of the sequence once"):
            Deal(torch.tensor(wrong))
    deal = deal_documents(torch.zeros(8, dtype=torch.int64), 2)
    check_balance(deal, 8, 2)
    for length, size in ((16, 2), (8, 4)):
        with pytest.raises(ValueError, match=r"Deal\(2 x 4 tokens, \w+\) is not one"):
            check_balance(deal, length, size)
