"""What the page on when tensor parallelism pays says about its numbers is so."""

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
from xtrain_docs.lectures.lc4 import pays, steps

MODEL, TOKENS = "llama-3-70b", 4096


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


def test_a_second_node_costs_the_small_model_and_never_doubles_the_large():
    gained = [
        pays.tp_speed_on_two_nodes(model, TOKENS)
        / pays.tp_speed(model, TOKENS, pays.NODE, "nvlink4")
        for model in ("llama-3-8b", MODEL, "llama-3.1-405b")
    ]
    assert gained[0] < 1 < gained[1] < gained[2] < 1.5


def test_a_token_by_itself_is_latency():
    latency = {row[1]: row[4] for row in pays.tp_messages(models=(MODEL,)).rows}
    assert latency["1"] == "100 %"
    assert int(latency["4096"].split()[0]) < 20


def test_tables_and_figures_hold_every_link_and_both_sides():
    table = pays.tp_pays()
    assert [row[0] for row in table.rows] == ["2", "4", "8", "16"]
    assert all(name in pays.tp_speeds() for name in pays.NAMES.values())
    drawing = pays.tp_against_zero_3()
    assert "tensor parallel" in drawing and "ZeRO stage 3" in drawing
    row = next(row for row in pays.tp_or_zero_3().rows if row[0] == MODEL)
    equal = tokens_where_equal(ModelShape.preset(MODEL))
    assert row[3] == f"{round(equal):,}".replace(",", " ")
    assert equal / 8 < 8192  # its own sequence of 8192 tokens is on stage 3's side
    assert layer_calls(ModelShape.preset(MODEL), 1, round(equal), 8)
    assert len(pays.tp_two_nodes().rows) == 3


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
    attention = 3 * 4 * 8192 * 1025 / 2  # causal: half of the pairs
    rate = ACCELERATORS["h100"].matmul
    assert work == pytest.approx((matrices + attention) * 1024 / 8 / rate)
    switch = pays.seconds_if_the_switch_adds("llama-3-70b", 1024)
    assert switch == pytest.approx(4 * (2 * hop + 1024 * 8192 * 2 / 450e9))
    assert pays.share_of_sums("llama-3-70b", 1024, 8, "nvlink4") == sums / (sums + work)
    added = pays.share_of_sums("llama-3-70b", 1024, 8, "nvlink4", switch=True)
    assert added == switch / (switch + work)
