"""Medians, quartiles and ratios, against values worked out by hand."""

import random
import statistics as standard

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xtrain.bench.measurement import compare, quantile


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


@given(st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=40))
def test_quartiles_agree_with_the_standard_library(values):
    low, middle, high = standard.quantiles(values, n=4, method="inclusive")
    assert quantile(values, 0.25) == pytest.approx(low)
    assert quantile(values, 0.5) == pytest.approx(middle)
    assert quantile(values, 0.75) == pytest.approx(high)


def test_no_values_is_an_error_that_says_why():
    with pytest.raises(ValueError, match="every sample was dropped"):
        quantile([], 0.5)


def test_one_very_slow_sample_does_not_move_the_median_much():
    assert quantile([1.0, 1.1, 0.9, 50.0, 1.0], 0.5) == 1.0


@pytest.mark.parametrize(
    ("baseline", "contestant", "expected"),
    [
        # Medians 4 and 2, so 2x. Rounds: 4/1, 4/2, 6/3, 2/2 = 4, 2, 2, 1, whose
        # quartiles are 1 + 0.75 (2 - 1) and 2 + 0.25 (4 - 2).
        ([4.0, 4.0, 6.0, 2.0], [1.0, 2.0, 3.0, 2.0], (2.0, 1.75, 2.5)),
        # Medians: baseline of 4, 8 = 6; contestant of 2, 1 = 1.5. One full round: 8/2.
        ([4.0, None, 8.0], [None, 1.0, 2.0], (4.0, 4.0, 4.0)),
        ([1.0, None], [None, 1.0], None),
    ],
)
def test_ratio_is_of_medians_and_spread_is_of_rounds(baseline, contestant, expected):
    found = compare(baseline, contestant)
    assert found == (expected and pytest.approx(expected))


def test_drift_of_the_machine_cancels_in_the_rounds():
    # The machine slows down tenfold; the contestant stays 1.5 times as fast.
    speed = [1.0 + 0.9 * step for step in range(11)]
    random.Random(3).shuffle(speed)
    found = compare([3.0 * s for s in speed], [2.0 * s for s in speed])
    assert found == pytest.approx((1.5, 1.5, 1.5))
