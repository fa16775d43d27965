"""Tables of the interview pages: what they compute, checked by hand."""

import pytest

from xtrain_docs.lectures.lc3.interview import LINKS, stage_seconds, stage_times


def test_stage_3_takes_half_as_long_again_and_every_layers_latency():
    ranks, layers, alpha, beta = 8, 10, 1e-6, 1e-9
    found = stage_seconds(8e9, layers, ranks, alpha, beta)
    transfer = 7 / 8 * 8e9 * beta
    assert found["two"] == pytest.approx(2 * (7 * alpha + transfer))
    assert found["three"] == pytest.approx(3 * (layers * 7 * alpha + transfer))
    assert found["latency"] == pytest.approx(3 * layers * 7 * alpha)
    free = stage_seconds(8e9, layers, ranks, 0.0, beta)
    assert free["three"] / free["two"] == pytest.approx(1.5)


def test_the_table_has_a_row_for_each_link():
    assert len(stage_times().rows) == len(LINKS)
