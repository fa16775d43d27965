"""The page on choosing a layout: its tables and its picture are of xtrain.plan."""

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import Accelerator, ModelShape
from xtrain_docs.lectures.planning import index


def test_the_table_of_what_fits():
    rows = page_rows("planning/index.md", "recipe")
    assert len(rows) == 8
    by_name = {(row[0], row[1][-1]): row for row in rows}
    plain = by_name["megatron18", "0"]
    assert plain[2] == "73.9"
    assert [cell.split()[0] for cell in plain[3:]] == ["84.4", "74.7", "94.9", "75.4"]
    assert ["not" in cell for cell in plain[3:]] == [True, False, True, False]
    for recipe in ("megatron18", "zero16"):
        assert all(cell.endswith(" fits") for cell in by_name[recipe, "1"][3:])


def test_the_table_of_traffic_adds_up():
    rows = page_rows("planning/index.md", "axis")
    assert [row[0].split(",")[0] for row in rows] == ["tensor", "data", "pipeline"]
    shares = [float(row[2].split()[0]) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.2) and shares[0] > 90


def test_the_search_of_the_page():
    ranked = page_rows("planning/index.md", "layout")
    assert [row[0] for row in ranked] == [str(place) for place in range(1, 9)]
    assert all(float(row[8].split()[0]) < float(row[7].split()[0]) for row in ranked)
    changes = page_rows("planning/index.md", "what if")
    assert changes[0][0] == "as it is" and len(changes) >= 4
    assert any(
        "Compute takes" in row[0] for row in page_rows("planning/index.md", "limits")
    )
    rejected = page_rows("planning/index.md", "rule")
    assert {"memory", "zero-with-pipeline"} <= {row[0] for row in rejected}


def test_the_picture_has_a_bar_for_each_case():
    drawing = index.fit_70b_memory()
    assert drawing.count("xt-bar-fill") == 8
    assert "usable" in drawing and "ZeRO-1, none" in drawing


def gibibytes(rows, words: str) -> tuple[float, float]:
    """States and activations of the one row that says so."""
    (row,) = [row for row in rows if words in row[1]]
    return float(row[2]), float(row[3])


def test_each_divides_what_it_cuts():
    """Of eight ranks: an eighth of what is cut, and all of the rest."""
    rows = page_rows("planning/what-each-cuts.md", "model")
    dense = [row for row in rows if "llama" in row[0]]
    states, activations = gibibytes(dense, "nothing")
    shape = ModelShape.preset("llama-3-8b")
    assert states == pytest.approx(18 * shape.parameters / 2**30, rel=0.01)
    assert gibibytes(dense, "data parallelism") == (states, activations)
    for words in ("ZeRO-3", "tensor"):
        assert gibibytes(dense, words)[0] == pytest.approx(states / 8, rel=0.01)
    assert gibibytes(dense, "ZeRO-1")[0] == pytest.approx(
        states * (6 + 12 / 8) / 18, rel=0.01
    )
    for words in ("tensor", "sequence: context"):
        assert gibibytes(dense, words)[1] == pytest.approx(activations / 8, rel=0.01)
    assert gibibytes(dense, "context")[0] == states
    assert gibibytes(dense, "pipeline")[1] > activations / 2
    moe = [row for row in rows if "mixtral" in row[0]]
    whole, cut = (gibibytes(moe, words)[0] for words in ("batch alone", "experts"))
    shape = ModelShape.preset("mixtral-8x7b")
    experts = 32 * shape.experts_of_layer(0) * 18 / 2**30
    assert whole - cut == pytest.approx(experts * 7 / 8, rel=0.01)


def test_what_waits_sends_most():
    rows = page_rows("planning/what-each-cuts.md", "axis")
    assert {row[0] for row in rows[:2]} == {"tensor", "expert"}
    assert {row[0] for row in rows[-3:]} == {"data", "expert_data", "pipeline"}
    inside, between = (float(rows[0][n].removesuffix(" %")) for n in (3, 4))
    assert between / inside == pytest.approx(450 / 50, rel=0.01)


def test_the_tokens_that_hide_a_stage():
    rows = page_rows("planning/what-each-cuts.md", "stage")
    shape = ModelShape.preset("llama-3-8b")
    seconds = shape.parameters * (4 + 2) * 63 / 64 / 50e9
    tokens = seconds * Accelerator.preset("h100").flops / shape.flops_per_token(8192)
    assert float(rows[1][3].replace(" ", "")) == pytest.approx(tokens, rel=0.01)
    for row in rows:
        one, all_of_them = (float(cell.replace(" ", "")) for cell in row[3:5])
        assert one == pytest.approx(8 * all_of_them, rel=1e-3)


def test_wider_data_ranks_hide_less():
    """One batch on more and more data ranks: slower than the devices grow."""
    rows = page_rows("planning/whole-run.md", "data ranks | devices")
    assert [int(row[0]) * int(row[2]) for row in rows] == [512] * 5
    shown, mfu = ([float(row[at].split()[0]) for row in rows] for at in (3, 4))
    assert shown == sorted(shown) and shown[-1] > 5 * shown[0]
    assert mfu == sorted(mfu, reverse=True) and mfu[-1] < 0.9 * mfu[0]
