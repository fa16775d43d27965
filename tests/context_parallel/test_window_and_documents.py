"""Sliding windows and packed documents over cut sequences, in float64, against torch
with the whole mask."""

from unittest.mock import patch

import pytest
import torch

from tests.context_parallel.attention_cases import deal_of, errors_of, qkv, visible
from xtrain.context_parallel import mask
from xtrain.context_parallel.balance import positions_of
from xtrain.context_parallel.block_attention import TILES
from xtrain.context_parallel.sequence_mask import SequenceMask
from xtrain.plan import pairs_by_step
from xtrain.plan.context_parallel import ring_steps

GATHERED = "xtrain.context_parallel.all_gather_attention:all_gather_attention"
LAYOUTS = [
    (True, "none"), (True, "striped"), (True, "zigzag"), (False, "none"),
    (True, "dealt"), (False, "dealt"),
]  # fmt: skip
WINDOWS = (None, 1, 2, 7, 100)
IDS = ("one", "packed", "shuffled", "padding", "different per sequence")


def documents_of(kind: str | None, batch: int, length: int) -> torch.Tensor | None:
    """Ids of documents, [batch, length]."""
    where = torch.arange(length)
    ids = {
        None: None,
        "one": torch.full((length,), 7),
        "packed": where * 3 // length + where.eq(length - 1),
        "shuffled": where * 5 % 3,
        "padding": torch.where(where < length // 3, 4, -1),
        "different per sequence": where // 4,
    }[kind]
    if ids is None:
        return None
    rows = [ids + (kind == "different per sequence") * i * where for i in range(batch)]
    return torch.stack(rows)


def cases(name: str) -> list[tuple]:
    """Each window and each kind of documents once with every layout."""
    layouts = [LAYOUTS[0], LAYOUTS[3]] if name == "ulysses" else LAYOUTS[:5]
    hidden = [(window, None) for window in WINDOWS[1:]]
    hidden += [(None, kind) for kind in IDS] + [(3, "packed"), (4, "padding")]
    return [
        (name, causal, balance, window, kind, blocks, tile)
        for causal, balance in layouts
        for number, (window, kind) in enumerate(hidden)
        for blocks, tile in [((None, 256), (TILES, 4))[number % 2]]
        if causal or window is None
    ]


def all_cases(some: list[tuple], ranks: int) -> list[list[float]]:
    found = []
    for name, causal, balance, window, kind, blocks, tile in some:
        documents = documents_of(kind, 2, 6 * ranks)
        with patch.object(mask, "TILE", tile):
            found.append(errors_of(
                name, qkv(2 * ranks, 2, 6 * ranks), causal, balance,
                documents=documents, window=window, block_attention=blocks,
            ))  # fmt: skip
    return found


def check(world, ranks: int, name: str) -> None:
    some = cases(name)
    for errors in world(ranks).run(all_cases, some, ranks):
        for case, found in zip(some, errors, strict=True):
            assert all(error < 1e-12 for error in found), (case, found)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.verifies("xtrain.context_parallel.ring_attention:ring_attention")
def test_ring_attention_with_windows_and_documents(world, ranks):
    check(world, ranks, "ring")


@pytest.mark.parametrize("name", ["all_gather", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.verifies(GATHERED, "xtrain.context_parallel.ulysses:ulysses_attention")
@pytest.mark.verifies("xtrain.context_parallel.running_attention:masked_attention")
def test_the_others_with_windows_and_documents(world, ranks, name):
    check(world, ranks, name)


@pytest.mark.parametrize(("causal", "balance"), LAYOUTS)
@pytest.mark.parametrize("kind", [None, *IDS])
@pytest.mark.parametrize("tile", [3, 256])
@pytest.mark.verifies("xtrain.context_parallel.sequence_mask:SequenceMask")
@pytest.mark.verifies("xtrain.context_parallel.mask:Visible")
def test_the_blocks_of_all_ranks_make_up_the_whole_mask(
    causal, balance, kind, tile, monkeypatch
):
    monkeypatch.setattr(mask, "TILE", tile)
    size, local = 3, 8
    ids = documents_of(kind, 2, size * local)
    if balance == "dealt":
        balance = deal_of(ids, size * local, size)
    for window in WINDOWS if causal else (None,):
        whole = visible(size * local, causal, window, ids).expand(2, 1, -1, -1)[:, 0]
        order = torch.cat(
            [positions_of(rank, size, local, balance) for rank in range(size)]
        )
        cut = whole[:, order][:, :, order]
        by_rank = ids if ids is None else ids[:, order].unflatten(1, (size, local))
        of = SequenceMask(
            size, local, local, causal, balance, window,
            by_rank if by_rank is None else by_rank.movedim(1, 0),
        )  # fmt: skip
        for query_rank in range(size):
            for key_rank in range(size):
                rows = slice(query_rank * local, (query_rank + 1) * local)
                columns = slice(key_rank * local, (key_rank + 1) * local)
                expected = cut[:, rows, columns]
                blocks = of.blocks(query_rank, key_rank)
                assert bool(blocks) == bool(expected.any())
                hides_nothing = window in (None, 100) and kind in (None, "one")
                if hides_nothing and isinstance(balance, str):
                    assert all(block.mask is None for block in blocks)
                assert torch.equal(drawn(blocks, local), expected)


@pytest.mark.verifies("xtrain.plan.context_parallel:ring_steps")
@pytest.mark.verifies("xtrain.context_parallel.sequence_mask:SequenceMask")
def test_a_ring_ends_at_the_last_rank_that_a_window_reaches():
    for balance in ("none", "striped", "zigzag"):
        for window in range(1, 40):
            of = SequenceMask(4, 8, 8, True, balance, window)
            seen = {
                (query - key) % 4
                for query in range(4)
                for key in range(4)
                if of.blocks(query, key)
            }
            assert max(seen) < of.steps
            if balance == "none":
                assert of.steps == max(seen) + 1 == ring_steps(8, 4, window)
            else:
                assert of.steps == 4
    assert SequenceMask(4, 8, 8, True).steps == 4
    assert SequenceMask(4, 8, 8, False).steps == 4


@pytest.mark.verifies("xtrain.plan.context_parallel:pairs_by_step")
def test_zigzag_over_packed_documents_is_not_balanced():
    """The front half one document, each token behind it its own."""
    ranks, local = 4, 8
    whole = torch.arange(ranks * local).clamp_min(ranks * local // 2 - 1)
    seen = visible(ranks * local, True, None, whole[None])[0, 0]
    pairs = [
        int(seen[positions_of(rank, ranks, local, "zigzag")].sum()) - local // 2
        for rank in range(ranks)  # without the pairs of short documents with themselves
    ]
    assert pairs == [sum(row) for row in pairs_by_step("none", ranks, local // 2)]


@pytest.mark.parametrize("window", [17, None])
@pytest.mark.verifies("xtrain.context_parallel.mask:Visible")
def test_what_is_far_apart_is_skipped_without_a_look_at_tiles(window, monkeypatch):
    """Two documents a rank, and padding; without documents if there is a window."""
    ids = torch.arange(64).view(4, 1, 16) // 8
    ids[3] = -1
    monkeypatch.setattr(mask.Visible, "strips", None)
    of = SequenceMask(4, 16, 16, True, "none", window, None if window else ids)
    assert of.blocks(2, 0) == of.blocks(3, 1) == ()


@pytest.mark.verifies("xtrain.context_parallel.sequence_mask:SequenceMask")
def test_masks_are_made_on_the_cpu_whatever_the_default_device_is():
    """As on ranks with a GPU ("meta" stands for it); documents are on the CPU."""
    of = SequenceMask(2, 4, 4, True, "zigzag", 5, torch.arange(16).view(2, 2, 4) // 3)
    ranks = [(query, key) for query in (0, 1) for key in (0, 1)]
    with torch.device("meta"):
        assert of.steps == 1
        found = [drawn(of.blocks(*pair), 4) for pair in ranks]
    assert any(block.mask for pair in ranks for block in of.blocks(*pair))
    for pair, seen in zip(ranks, found, strict=True):
        assert torch.equal(seen, drawn(of.blocks(*pair), 4))


def drawn(blocks, local: int) -> torch.Tensor:
    """What blocks let be seen, [2, local, local]; each pair is in one of them only."""
    seen = torch.zeros(2, local, local, dtype=torch.bool, device="cpu")
    for block in blocks:
        part = seen[:, block.queries, block.keys]
        assert not part.any()
        if block.mask is not None:
            part |= block.mask()[:, 0]
        else:
            part |= torch.ones_like(part).tril() if block.causal else True
    return seen
