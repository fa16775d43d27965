"""Medians, quartiles and ratios, against values worked out by hand."""

import random
import statistics as standard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.bench.medians import compare, quantile, summarize


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([3.0], 0.5, 3.0),
        ([1.0, 3.0], 0.5, 2.0),
        ([5.0, 1.0, 3.0], 0.5, 3.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.25, 2.0),
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.75, 4.0),
        ([1.0, 2.0, 3.0, 4.0], 0.25, 1.75),  # place 0.75: 1 + 0.75 (2 - 1)
        ([1.0, 2.0, 3.0, 4.0], 1.0, 4.0),
        ([1.0, 2.0, 3.0, 4.0], 0.0, 1.0),
    ],
)
def test_quantiles_worked_out_by_hand(values, share, expected):
    assert quantile(values, share) == pytest.approx(expected)


@given(
    st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=40),
)
def test_quartiles_agree_with_the_standard_library(values):
    low, middle, high = standard.quantiles(values, n=4, method="inclusive")
    assert quantile(values, 0.25) == pytest.approx(low)
    assert quantile(values, 0.5) == pytest.approx(middle)
    assert quantile(values, 0.75) == pytest.approx(high)


def test_no_values_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="every sample was dropped"):
        summarize([])


def test_one_very_slow_sample_does_not_move_the_median_much():
    assert summarize([1.0, 1.1, 0.9, 50.0, 1.0]).median == 1.0


def test_ratio_is_of_medians_and_spread_is_of_rounds():
    # Medians 4 and 2, so 2x. Rounds: 4/1, 4/2, 6/3, 2/2 = 4, 2, 2, 1.
    found = compare([4.0, 4.0, 6.0, 2.0], [1.0, 2.0, 3.0, 2.0])
    assert found.ratio == pytest.approx(2.0)
    assert found.low == pytest.approx(1.75)  # 1 + 0.75 (2 - 1)
    assert found.high == pytest.approx(2.5)  # 2 + 0.25 (4 - 2)
    assert found.count == 4


def test_dropped_samples_take_their_round_out_of_the_spread():
    # Medians: baseline of 4, 8 = 6; contestant of 2, 1 = 1.5. One full round: 8/2.
    found = compare([4.0, None, 8.0], [None, 1.0, 2.0])
    assert found.ratio == pytest.approx(4.0)
    assert (found.low, found.high, found.count) == (4.0, 4.0, 1)


def test_no_round_with_both_sides_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        compare([1.0, None], [None, 1.0])


def test_drift_of_the_machine_cancels_in_the_rounds():
    # The machine slows down tenfold; the contestant stays 1.5 times as fast.
    speed = [1.0 + 0.9 * step for step in range(11)]
    random.Random(3).shuffle(speed)
    found = compare([3.0 * s for s in speed], [2.0 * s for s in speed])
    assert found.low == found.high == pytest.approx(1.5)
    assert found.ratio == pytest.approx(1.5)
