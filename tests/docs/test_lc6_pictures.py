"""Pictures and tables of lc6: pictures are of real runs, tables of published facts."""

import re

import pytest
import torch

from tests.docs.rendering import page_rows
from xtrain.bench import attention_trials
from xtrain.bench.races import lc6
from xtrain.plan import pairs_by_step
from xtrain_docs import runs
from xtrain_docs.lectures.lc6 import (
    balance,
    flash_attention,
    online_softmax,
    ring_attention,
    whole_model,
)

WAYS = "lc6-context-parallel/ulysses-and-all-gather.md"


# ----------------------------------------------------------------- computed by formula


def test_tokens_that_hide_a_ring_by_hardware():
    rows = {row[0]: row[1:] for row in page_rows(WAYS, "no mask")}
    assert rows["H100, NVLink 4"] == ["2199", "4397", "550", "660", "5300"]
    assert rows["A100, NVLink 3"][:2] == ["1040", "2080"]
    nvlink, network = rows["H100, NVLink 4"], rows["H100, InfiniBand NDR"]
    assert int(network[2]) == pytest.approx(9 * int(nvlink[2]), abs=9)


def test_the_published_table_of_the_ring_attention_paper():
    """As computed, and within a hundredth of what the paper prints."""
    rows = page_rows(WAYS, "TFLOP/s")
    for row in rows:
        ours, printed = float(row[5].replace(" ", "")), float(row[6].split()[0])
        assert ours == pytest.approx(1000 * printed, rel=0.01)
    assert [row[3] for row in rows] == ["1040", "1098", "1026", "1054", "24 960"]
    assert [row[5] for row in rows] == ["6240", "6589", "6157", "6323", "149 760"]


def test_bytes_of_published_models():
    rows = page_rows(WAYS, "model")
    # 2 x 32 x 128 x 4096 elements of each of 4 ranks; see facts of llama-2-7b
    keys = 2 * 32768 * 32 * 128 * 2
    ring = 3 * keys + 3 * keys + 4 * 2 * keys
    assert rows[0][3] == f"{ring / 2**30:g} GiB"
    assert [row[0] for row in rows][::3] == ["llama-2-7b", "llama-3-8b", "llama-3-70b"]


def test_memory_of_a_cut_sequence_is_that_of_the_tokens_a_rank_has():
    """34 bytes a token and feature are kept of a layer, or its input in 16 bits."""
    whole, part = page_rows("lc6-context-parallel/index.md", "activations of 32 layers")
    features = 32 * 131072 * 4096
    assert whole[1:] == [f"{n * features / 2**30:.3g} GiB" for n in (34, 2)]
    assert part == ["each of 8", "68 GiB", "4 GiB"]


def test_the_sizes_that_the_page_of_races_says():
    assert (attention_trials.HEADS, attention_trials.HEAD_DIM) == (8, 64)
    assert attention_trials.size_of(8 * 32) == lc6.SLEEP


# ------------------------------------------------------------------ drawn from a run


def test_heat_maps_show_the_pairs_of_each_rank_and_step(on_ranks):
    drawing = balance.causal_work()
    found = re.findall(r"<title>rank (\d), step (\d): (\d+) pairs</title>", drawing)
    assert [tuple(map(int, numbers)) for numbers in found] == [
        (rank, step, pairs)
        for name in ("none", "striped", "zigzag")
        for rank, row in enumerate(pairs_by_step(name, 4, 4))
        for step, pairs in enumerate(row)
    ]


def test_each_pair_has_the_colour_of_the_rank_that_holds_its_query(on_ranks):
    drawing = balance.who_computes("striped")
    found = re.findall(r"<title>query (\d+), key (\d+): rank (\d)</title>", drawing)
    assert sorted(tuple(map(int, numbers)) for numbers in found) == [
        (q, k, q % 4) for q in range(16) for k in range(q + 1)
    ]


def test_the_tiles_are_those_that_a_causal_mask_leaves(on_ranks):
    edges = [(0, 256), (256, 256), (512, 256), (768, 256), (1024, 76)]
    assert runs.remembered(flash_attention.tiles, 1)[0] == [
        [*row, *key] for row in edges for key in edges if key <= row
    ]
    drawing = flash_attention.flash_tiles()
    assert drawing.count("xt-bar-fill") == 15
    assert drawing.count("<rect") == 25


def test_the_states_of_online_softmax_are_softmax_of_what_was_seen(on_ranks):
    drawing = online_softmax.softmax_weights()
    scores = torch.tensor(online_softmax.SCORES, dtype=torch.float64).flatten()
    found = runs.remembered(online_softmax.states, 1)[0]
    for number, (lse, weights) in enumerate(found, 1):
        seen = scores[: 3 * number]
        assert lse == pytest.approx(seen.logsumexp(0).item(), abs=1e-12)
        assert weights[: 3 * number] == pytest.approx(seen.softmax(0).tolist())
        assert not any(weights[3 * number :])
        assert f"lse {lse:.2f}" in drawing
    assert drawing.count("<rect") == 3 + 6 + 9
    before, block = re.findall(r"; ([\d.]+) before \+ ([\d.]+) block", drawing)
    assert float(before[1]) == pytest.approx(1 - float(before[0]))
    assert float(block[0]) == pytest.approx(
        (scores[:6].logsumexp(0) - scores.logsumexp(0)).exp().item(), abs=5e-3
    )


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_keys_visit_every_rank_and_come_by_again_in_backward(on_ranks, ranks):
    for rank, found in enumerate(runs.remembered(ring_attention.messages, ranks)):
        visits = [(rank - step) % ranks for step in range(ranks)]
        assert found["keys"] == found["keys again"] == visits[:-1]
    data = ring_attention.ring_attention_keys(ranks).data
    assert len(data["steps"]) == ranks - 1
    states = [data["initial"], *(step["state"] for step in data["steps"])]
    for step, state in enumerate(states):
        for rank, row in enumerate(state):
            owner = (rank - step) % ranks
            assert row == [[owner] if cell == owner else [] for cell in range(ranks)]
    assert {m["op"] for step in data["steps"] for m in step["messages"]} == {"copy"}


def test_gradients_grow_on_their_way_and_come_home(on_ranks):
    data = ring_attention.ring_attention_gradients(4).data
    assert len(data["steps"]) == 4, "one hop more than the keys"
    home = [row[rank] for rank, row in enumerate(data["steps"][-1]["state"])]
    assert home == [[0, 1, 2, 3], [1, 2, 3], [2, 3], [3]]
    first = data["steps"][0]["messages"]
    assert (first[0]["src"], first[0]["dst"], first[0]["content"]) == (0, 1, [[0]])
    assert [m["op"] for m in first] == ["add", "add", "add", "copy"]


def test_every_token_is_on_one_rank_with_each_balance(on_ranks):
    drawing = whole_model.tokens_of_context_ranks()
    for said in ("none: rank 0 has [0, 1, 2, 3]", "striped: rank 0 has [0, 4, 8, 12]",
                 "zigzag: rank 0 has [0, 1, 14, 15]"):  # fmt: skip
        assert said in drawing
    tokens = re.findall(r"<title>token (\d+), rank", drawing)
    assert sorted(map(int, tokens)) == sorted([*range(16)] * 3)
