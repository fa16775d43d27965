"""The page "How far off is it?": its numbers are those of the runs that it names."""

import re
from statistics import median

import pytest

from tests.docs.rendering import page_rows
from xtrain.plan import FITTED, RANGES
from xtrain.plan.fit import LIMITS
from xtrain_docs.lectures.planning import how_far_off as page

NAME = "planning/how-far-off.md"


def test_the_errors_are_of_runs_that_were_not_fitted():
    fitted, others = page.parts()
    assert not {run.name for run in fitted} & {run.name for run in others}
    rows = page_rows(NAME, "models | runs")
    assert [row[0] for row in rows] == ["dense", "experts"]
    for row in rows:
        chosen = [run for run in others if run.kind == row[0]]
        off = [abs(run.ratio() - 1) for run in chosen]
        assert int(row[1]) == len(chosen)
        assert float(row[2].split()[0]) / 100 == pytest.approx(median(off), abs=0.02)
        low, high = RANGES[row[0]]
        assert row[4] == f"{low:g} to {high:g}"


def test_groups_count_every_judged_run_once():
    total = page.off_count("judged")
    for by in ("accelerator", "kind", "collection"):
        assert sum(count for _, count, _, _ in page.off_groups(by)) == total
    assert page.off_pairs("")[1] >= sum(page.off_pairs(x)[1] for x in ("bsc", "upb"))
    refused = page_rows(NAME, "why | lines")
    missing = page.off_count("file") - page.off_count("read")
    assert sum(int(row[1]) for row in refused) == missing


def test_every_constant_is_on_the_page_with_its_words():
    rows = {row[0].strip("`"): row for row in page_rows(NAME, "constant | value")}
    assert set(rows) == set(FITTED._fields) == set(LIMITS)
    assert all(len(row[2]) > 8 for row in rows.values())


def test_the_worst_ten_are_sorted_and_lead_to_their_sources():
    rows = page.off_worst(10)
    far = [max(ratio, 1 / ratio) for *_, ratio in rows]
    assert far == sorted(far, reverse=True) and len(far) == 10
    assert all(link.startswith("https://") for _, _, link, _, _ in rows)


def test_each_point_of_the_picture_is_a_link():
    drawing = page.off_plot()
    assert drawing.count("<a href=") == page.off_count("judged")
    assert len(re.findall(r"<circle[^>]*r=\"3.5\"", drawing)) == page.off_count(
        "judged"
    )


def test_sources_as_addresses():
    line = "bigscience-workshop/bigscience train/a/b.md@9e64ede line 476 [Choosing]"
    assert page.source_link(line) == (
        "https://github.com/bigscience-workshop/bigscience/blob/9e64ede/train/a/b.md#L476"
    )
    assert page.source_link("arXiv 2205.05198 Table 5").endswith("abs/2205.05198")
    with pytest.raises(ValueError, match="names no repository"):
        page.source_link("somewhere")
