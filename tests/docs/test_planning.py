"""The page on choosing a layout: its tables and its picture are of xtrain.plan."""

import pytest

from xtrain.plan import ModelShape, traffic_per_step
from xtrain_docs.lectures.planning import choosing


def test_the_table_of_what_fits():
    rows = choosing.fit_70b_states().rows
    assert len(rows) == len(choosing.CASES)
    by_name = {(row[0].strip("`"), row[1]): row for row in rows}
    plain = by_name["megatron18", "ZeRO-0"]
    assert plain[2] == "73.9"
    assert [cell.split()[0] for cell in plain[3:]] == ["84.4", "74.7", "94.9", "75.4"]
    assert ["not" in cell for cell in plain[3:]] == [True, False, True, False]
    for name in (("megatron18", "ZeRO-1"), ("zero16", "ZeRO-1")):
        assert all(cell.endswith(" fits") for cell in by_name[name][3:])


def test_the_page_says_thirty_gigabytes():
    """70 GB whole and 30.6 with a sharded optimizer, of 70e9 parameters."""
    assert choosing.fit_70b_parameters() / 1e9 == pytest.approx(4.41, abs=0.01)
    assert choosing.fit_70b_gib("megatron18", 0, 8192, "none") == pytest.approx(
        94.9, abs=0.05
    )


def test_the_table_of_traffic_adds_up():
    rows = choosing.fit_70b_traffic().rows
    assert [row[0].split(",")[0] for row in rows] == ["tensor", "data", "pipeline"]
    shares = [float(row[2].split()[0]) for row in rows]
    assert sum(shares) == pytest.approx(100, abs=0.2) and shares[0] > 90
    shape = ModelShape.preset(choosing.MODEL)
    sent = traffic_per_step(shape, choosing.example(zero=1), 8192)
    whole = float(sum(t.sent for t in sent if t.axis == "tensor"))
    assert rows[0][1] == f"{whole / 1e12:.3g} TB"


def test_the_search_of_the_page():
    found = choosing.searched()
    assert choosing.fit_70b_tried() == found.tried
    ranked = choosing.fit_70b_ranked().rows
    assert [row[0] for row in ranked] == [str(place) for place in range(1, 9)]
    assert any(row[1] == "TP8 PP2 DP4 ZeRO-1" for row in ranked)
    first, last = found.found[0].seconds, found.found[7].seconds
    assert choosing.fit_70b_spread() == pytest.approx(last / first - 1)
    rejected = choosing.fit_70b_rejected().rows
    assert {"memory", "zero-with-pipeline"} <= {row[0] for row in rejected}


def test_the_picture_has_a_bar_for_each_case():
    drawing = choosing.fit_70b_memory()
    assert drawing.count("xt-bar-fill") == 8
    assert "usable" in drawing and "ZeRO-1, none" in drawing
