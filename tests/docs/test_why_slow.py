"""What the page on slow steps claims of its four cases and their cures."""

import json
from functools import lru_cache

import pytest

from xtrain_docs.lectures.lc8 import why_slow as page


@pytest.fixture(scope="module", autouse=True)
def runs():
    """Each case runs here once, not as it was kept."""
    patch = pytest.MonkeyPatch()
    patch.setattr(page, "case", lru_cache(page.traced))
    yield
    patch.undo()


def test_each_cause_takes_a_quarter_to_a_third_of_the_flops_and_its_cure_gives_back():
    healthy = page.slow_mfu("healthy", True)
    assert healthy == pytest.approx(0.45, abs=0.015)
    for name, cure in page.CURES.items():
        assert 0.29 <= page.slow_mfu(name, True) <= 0.355, name
        assert page.slow_mfu(cure, True) > 0.97 * healthy, cure


@pytest.mark.verifies("xtrain.train.stragglers:slow_ranks")
def test_one_number_tells_each_cause_from_the_others():
    of_data = {name for name in page.CURES if page.slow_share(name) > 0.1}
    uneven = {
        name for name in page.CURES
        if page.slow_share(name, "most") > 2 * page.slow_share(name, "least")
    }  # fmt: skip
    even = {n for n in page.CURES if page.slow_share(n, "least") > 0.2}
    by_the_clock = {
        name for name in page.CURES
        if page.slow_mfu(name) > 1.1 * page.slow_mfu(name, True)
    }  # fmt: skip
    assert (of_data, uneven) == ({"data"}, {"straggler"})
    assert (even, by_the_clock) == ({"exposed"}, {"checkpoint"})
    assert page.slow_mfu("checkpoint") == pytest.approx(page.slow_mfu("healthy"))
    named = {n: page.slow_ranks(page.of_ranks(n)) for n in page.CASES}
    assert [n for n, found in named.items() if found] == ["straggler"]
    assert named["straggler"][0].text.startswith("rank 3 is slow: ")
    rows = page.slow_numbers().rows
    assert [row[0] for row in rows] == ["healthy", *page.CURES]
    assert [row[-1] for row in rows] == ["none", "rank 3", "none", "none", "none"]


def test_pictures_show_lost_time_and_share_an_axis_with_their_cure():
    for name, colour in zip(page.CURES, ("h", "message", "collective"), strict=False):
        assert f'class="{colour}"' in page.slow_steps(name)
    assert page.slow_steps("exposed").count("Download") == 1
    for name in page.CURES:
        before, after = page.slow_steps(name), page.slow_steps(name, True)
        assert f"{page.seconds(page.case(name)['end'])}</text>" in before
        assert f"{page.seconds(page.case(name)['end'])}</text>" in after
    assert str(page.runs.__file__).rsplit("/src/", 1)[0] not in json.dumps(
        page.case("exposed")
    )
