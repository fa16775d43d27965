"""The page on published layouts: places and reasons are those of the search."""

import re

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import Layout, broken_rules, estimate
from xtrain_docs import config
from xtrain_docs.lectures.planning import published_layouts as page

NAME = "planning/published-layouts.md"
PAGE = (config.PAGES / NAME).read_text()


def test_each_case_has_a_row_and_a_reason():
    rows = page_rows(NAME, "run | devices")
    assert len(rows) == len(page.published()) == 12
    told = re.findall(r"layout_reasons\((.*)\)$", PAGE, re.MULTILINE)
    names = re.findall(r'"([\w-]+)"', " ".join(told))
    assert sorted(names) == sorted(page.published())
    ((_, words),) = page.layout_reasons("bloom")
    assert "beats" in words and "s less on" in words


@pytest.mark.parametrize("name", list(page.published()))
def test_published_axes_are_legal_and_use_the_devices(name):
    case = page.published()[name]
    layout = Layout(**case.axes)
    assert case.gpus in (8, 64, 256, 384, 512, 1536, 2048, 8192, 16384)
    assert case.batch % layout.data == 0
    assert not broken_rules(case.shape, layout, case.sequence)


def test_most_are_among_the_first_ten():
    """The goal of the search: the published one there, or a reason with numbers."""
    found = {name: page.place_of(name) for name in page.published()}
    assert all(found.values())  # each fits
    places = {name: place for name, (place, _) in found.items()}
    first_ten = {name for name, place in places.items() if place <= 10}
    assert {"llama-8192", "llama-16384", "llama-128k", "deepseek"} <= first_ten
    assert len(first_ten) > len(places) / 2


@pytest.mark.verifies("xtrain.plan.search:search")
def test_a_place_counts_axes_that_are_faster():
    """Counted anew: every layout that takes less time than the published axes'."""
    name = "bloom"
    case = page.published()[name]
    place, one = page.place_of(name)
    wanted = page.axes_of(one.layout)
    faster = {
        page.axes_of(other.layout)
        for other in page.searched(name).found
        if other.verdict == "fits" and other.seconds < one.seconds
    }
    assert wanted not in faster and place == len(faster) + 1
    again = estimate(case.shape, one.layout, case.gpu, case.sequence, **case.assumed)
    assert again.seconds == pytest.approx(one.seconds)


def test_deepseek_in_fewer_bytes_would_be_faster():
    """As the page has it: with selective recomputation faster, and too large."""
    found = page.layout_as_published(
        "deepseek", schedule="dualpipe", recompute="selective"
    )
    _, fits = page.place_of("deepseek")
    assert found.verdict == "does not fit" and found.seconds < fits.seconds
    assert fits.layout.recompute == "full"
