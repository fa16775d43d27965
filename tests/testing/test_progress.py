"""The bar of a long run."""

import pytest

from xtrain.testing.progress import LINES, WIDTH, ProgressBar


def test_the_bar_counts_tests_and_says_what_failed():
    half = ProgressBar(total=2000, expected=600.0, limit=1140.0, done=1000, failed=3)
    text = half.text(300.0)
    assert f"[{'#' * (WIDTH // 2)}{'.' * (WIDTH // 2)}] 1,000 of 2,000 tests" in text
    assert ", 3 failed, 5:00 left" in text
    assert "failed" not in ProgressBar(10, 5.0, 9.0).text(0.0)


@pytest.mark.parametrize(
    ("done", "elapsed", "left"),
    [
        (0, 0.0, 100.0),  # as thought
        (50, 100.0, 75.0),  # halfway between 50 as thought and 100 as measured
        (100, 180.0, 0.0),
        (1, 500.0, 100.0),  # the run ends then
    ],
)
def test_the_time_left_is_first_as_thought_then_as_measured(done, elapsed, left):
    run = ProgressBar(total=100, expected=100.0, limit=600.0, done=done)
    assert run.left(elapsed) == pytest.approx(left)


def test_a_run_of_any_length_has_as_many_lines_and_ends_with_one():
    for total in (1, 7, 3000):
        due = [n for n in range(1, total + 1) if ProgressBar(total, 1, 1, n).is_due()]
        assert len(due) == min(total, LINES)
        assert due[-1] == total


def test_without_tests_nothing_is_left():
    assert "0 of 0 tests, 0:00 left" in ProgressBar(0, 0.0, 60.0).text(1.0)
