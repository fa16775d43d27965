"""The timelines of overlap: what was recorded is what is drawn, or refused."""

import pytest

from xtrain_docs import runs
from xtrain_docs.evidence import EvidenceError
from xtrain_docs.lectures.lc4 import overlap, runs_overlap

SMALL = (16, 24)  # tokens, features


@pytest.mark.verifies("xtrain.tensor_parallel.functions:column_linear")
def test_the_sum_of_dx_travels_while_dw_is_computed_if_asked_for(on_ranks):
    recorded = {}
    for wanted in (False, True):
        function = runs_overlap.column_backward_by_the_clock
        for spans in runs.remembered(function, 2, wanted, *SMALL):
            overlap.check_backward(spans, wanted)
            with pytest.raises(EvidenceError, match=f"overlap={not wanted}"):
                overlap.check_backward(spans, not wanted)
        recorded[str(wanted)] = spans
    drawing = overlap.chart(recorded, ["dX", "dW"], "title", "words")
    assert drawing.count("matmul: ") == 4
    assert drawing.count("rank waits: ") == 2


@pytest.mark.verifies("xtrain.tensor_parallel.ring_matmul:ring_pieces")
def test_a_piece_of_the_ring_is_multiplied_while_the_next_one_travels(on_ranks):
    function = runs_overlap.column_forward_by_the_clock
    for spans in runs.remembered(function, 3, "ring", 18, 24):
        overlap.check_ring(spans, 3)
        first = next(span for span in spans if span[0] == "wait")
        early = [s if s is not first else ["wait", -2.0, -1.0] for s in spans]
        with pytest.raises(EvidenceError, match="step 0 of the ring"):
            overlap.check_ring(early, 3)
        with pytest.raises(EvidenceError, match="not 4 pieces"):
            overlap.check_ring(spans, 4)
    plain = runs.remembered(function, 3, True, 18, 24)[0]
    assert [what for what, *_ in plain] == ["message", "wait", "matmul"]


def test_the_table_compares_bytes_with_the_formula(on_ranks):
    table = overlap.overlap_sends(ranks=2, tokens=8, features=4)
    assert [row[1] for row in table.rows] == ["64", "128", "64", "64"]
    assert all(row[1] == row[2] == row[3] for row in table.rows)
    assert [row[4:] for row in table.rows] == [
        ["1", "2"],
        ["2", "4"],
        ["1", "2"],
        ["2", "4"],
    ]


def test_more_ranks_round_more_and_one_sum_in_fp32_stops_that():
    each = [overlap.rounding_of_sums(n) for n in (1, 2, 4, 8, 16)]
    once = [overlap.rounding_of_sums(n, each_hop=False) for n in (1, 2, 4, 8, 16)]
    assert each == sorted(each) and each[-1] > 3 * each[0]
    assert each[:2] == once[:2]
    assert max(once) < 1.5 * once[0]
    assert [row[0] for row in overlap.rounded_sums().rows] == ["1", "2", "4", "8", "16"]
