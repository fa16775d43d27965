"""What lc4's pages draw and compute: pictures of real numbers, and times of layers."""

import re

import pytest

from xtrain.plan import (
    ACCELERATORS,
    LINKS,
    ModelShape,
    layer_calls,
    layer_seconds,
    nccl_hop_seconds,
    tokens_where_equal,
)
from xtrain_docs import runs
from xtrain_docs.lectures.lc4 import (
    attention,
    cross_entropy,
    embedding,
    hugging_face,
    overlap,
    steps,
    whole_model,
)
from xtrain_docs.lectures.lc4 import when_it_pays as pays
from xtrain_docs.lectures.lc4.dataflow import MODULES, rows_of
from xtrain_docs.lectures.lc4.dataflow_drawing import WIDTH, data_flow

MODEL, TOKENS = "llama-3-70b", 4096


@pytest.mark.parametrize(("ranks", "parts"), [(2, "F/2"), (4, "F/4")])
def test_a_picture_says_what_the_table_declares_and_fits_a_phone(ranks, parts):
    for module in MODULES:
        drawing = data_flow(module, ranks)
        assert f"min-width:{round(0.8 * WIDTH)}px" in drawing
        assert re.search(r'viewBox="0 0 (\d+)', drawing)[1] == str(WIDTH)
        rows = rows_of(module, ranks)
        for kind in ("partial", "replicated"):
            boxes = sum(kind in (row.forward, row.backward) for row in rows)
            assert (boxes == 0) == (f">{kind}<" not in drawing)
    drawing = data_flow("swiglu", ranks)
    assert "f: nothing sent forward, all-reduce backward" in drawing
    assert "g: all-reduce forward, nothing sent backward" in drawing
    assert "x is replicated, its gradient partial" in drawing
    assert f"[B, S, {parts}]" in drawing
    assert drawing.count("identity_all_reduce") == 1


@pytest.mark.verifies("xtrain.model.parameters:placement_of")
def test_the_pictures_of_weights_show_every_rank_and_who_holds_the_same():
    heads, weights = attention.gqa_heads(), whole_model.slices_of_a_model()
    for drawing in (heads, weights, hugging_face.bytes_of_a_file()):
        assert 'viewBox="0 0 400 ' in drawing
        assert all(f"rank {rank}" in drawing for rank in range(4))
    for drawing in (weights, hugging_face.bytes_of_a_file()):
        assert all(f"xt-s{rank}" in drawing for rank in range(4))
    assert "rank 1: queries [2, 3], key heads [0]" in heads
    for said in (
        "embed_tokens: a slice each",
        "k_proj: 2 hold the same",
        "o_proj: a slice each",
        "last norm: whole on all",
    ):
        assert said in weights


def test_ranks_read_every_element_of_a_file_and_their_share_of_it():
    for name, shape, held in whole_model.slices():
        read = [
            [n for low, end in hugging_face.ranges(shape, one) for n in range(low, end)]
            for one in held
        ]
        numel = shape[0] * (shape[1] if shape[1:] else 1)
        assert set().union(*read) == set(range(numel))
        share = 1 if "norm" in name else 2 if name in ("k_proj", "v_proj") else 4
        for mine in read:
            assert len(mine) == len(set(mine)) == numel // share, name


def test_each_id_is_looked_up_by_one_rank(on_ranks):
    found = runs.remembered(embedding.looked_up, embedding.RANKS)
    for place, row in enumerate(embedding.IDS):
        assert sorted(here[place] for here, _ in found) == [0, row + 1]
        assert all(total[place] == row + 1 for _, total in found)
    drawing = embedding.embedding_lookup()
    assert drawing.count(">row 4</text>") == 4  # twice looked up, twice in the sum


def test_the_three_numbers_of_a_token_give_its_loss(on_ranks):
    assert "loss = log 1.553 - (-3) = 3.440" in cross_entropy.loss_steps()


def test_spans_are_drawn_in_the_order_of_the_events(on_ranks):
    """Which order is right says tests/tensor_parallel."""
    spans = overlap.timed(overlap.column_backward_by_the_clock, 2, False, True)
    orders = {how: [what for what, *_ in found] for how, found in spans.items()}
    assert orders["False"] == ["matmul", "message", "wait", "matmul"]
    assert orders["True"] == ["matmul", "message", "matmul", "wait"]
    drawing = overlap.chart(spans, ["dX", "dW"], "title", "words")
    assert drawing.count("matmul: ") == 4
    assert drawing.count("rank waits: ") == 2
    ring = overlap.timed(overlap.column_forward_by_the_clock, 3, True, "ring")
    assert [what for what, *_ in ring["True"]] == ["message", "wait", "matmul"]
    step = ["message", "matmul", "wait"]
    assert [what for what, *_ in ring["ring"]] == [*step, *step, "matmul"]


def test_more_ranks_round_more_and_one_sum_in_fp32_stops_that():
    each = [overlap.rounding_of_sums(n) for n in (1, 2, 4, 8, 16)]
    once = [overlap.rounding_of_sums(n, each_hop=False) for n in (1, 2, 4, 8, 16)]
    assert each == sorted(each) and each[-1] > 3 * each[0]
    assert each[:2] == once[:2]
    assert max(once) < 1.5 * once[0]


# ------------------------------------------------------------------- when it pays


def speeds(link: str) -> list[float]:
    return [pays.tp_speed(MODEL, TOKENS, ranks, link) for ranks in (1, 2, 4, 8)]


def test_every_doubling_helps_on_nvlink_and_ethernet_only_costs():
    nvlink, pcie, ethernet = map(speeds, ("nvlink4", "pcie5-x16", "ethernet-100g"))
    assert nvlink[0] == pcie[0] == ethernet[0] == 1
    assert nvlink[3] > 1.5 * nvlink[2] > 2 * nvlink[1]
    assert pcie[3] < 1.25 * pcie[2]
    assert max(ethernet[1:]) < 1


@pytest.mark.parametrize("ranks", [2, 8])
def test_the_ratio_is_the_formula_and_the_tokens_cancel(ranks):
    """8 (t-1) / 3 x H / P x F / W, with the matrices' FLOPs and without latency."""
    shape, link = ModelShape.preset(MODEL), LINKS["infiniband-ndr"]
    matrices = shape.layer_parameters - 2 * shape.hidden_size
    rate = ACCELERATORS["h100"].matmul
    ratio = 8 * (ranks - 1) / 3 * shape.hidden_size / matrices * rate / link.bandwidth
    for tokens in (256, 4096, 16384):
        calls, flops = layer_calls(shape, 1, tokens, ranks), 6 * matrices * tokens
        computing, sending = layer_seconds(
            calls, flops, ranks, rate, 0.0, link.bandwidth
        )
        assert sending / computing == pytest.approx(ratio), tokens


def test_a_second_node_is_nothing_to_the_small_model_and_never_doubles_the_large():
    gained = [
        pays.tp_speed_on_two_nodes(model, TOKENS) / pays.tp_speed(model, TOKENS, 8)
        for model in ("llama-3-8b", MODEL, "llama-3.1-405b")
    ]
    assert 0.98 < gained[0] < 1.02 < gained[1] < gained[2] < 1.5


def test_a_token_by_itself_is_latency():
    one, many = (
        pays.one_sum(MODEL, tokens, "nvlink4", nbytes=False)
        / pays.one_sum(MODEL, tokens, "nvlink4")
        for tokens in (1, TOKENS)
    )
    assert one > 0.995 and many < 0.2


def test_where_both_send_the_same_stage_3_and_tensor_parallelism_do():
    equal = tokens_where_equal(ModelShape.preset(MODEL))
    assert equal / 8 < 8192  # its own sequence of 8192 tokens is on stage 3's side
    assert pays.tp_bytes(MODEL, equal, 8) == pytest.approx(
        pays.zero_3_bytes(MODEL, 8), rel=1e-4
    )


def test_the_steps_are_those_of_the_races():
    rows = steps.tensor_parallel_steps().rows
    assert [row[0] for row in rows] == ["batch8", "batch1", "small"]
    assert [row[5] for row in rows] == ["8", "1", "1"]


def test_a_layers_sums_and_matrices_take_the_seconds_of_the_formulas():
    shape = ModelShape.preset("llama-3-70b")
    work, sums = pays.layer_times("llama-3-70b", 1024, 8, "nvlink4")
    moved = 2 * 7 / 8 * 1024 * 8192 * 2
    hop = nccl_hop_seconds(False)
    assert sums == pytest.approx(4 * (14 * hop + moved / 450e9))
    matrices = 6 * (shape.layer_parameters - 2 * 8192)
    scores = 3 * 4 * 8192 * 1025 / 2  # causal: half of the pairs
    rate = ACCELERATORS["h100"].matmul
    assert work == pytest.approx((matrices + scores) * 1024 / 8 / rate)
    switch = pays.seconds_if_the_switch_adds("llama-3-70b", 1024)
    assert switch == pytest.approx(4 * (2 * hop + 1024 * 8192 * 2 / 450e9))
    assert pays.share_of_sums("llama-3-70b", 1024, 8, "nvlink4") == sums / (sums + work)
    added = pays.share_of_sums("llama-3-70b", 1024, 8, "nvlink4", switch=True)
    assert added == switch / (switch + work)
