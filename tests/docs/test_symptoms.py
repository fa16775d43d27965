"""The bug gallery by symptom."""

from collections import Counter

import pytest

from xtrain_docs import config
from xtrain_docs.tables.symptoms import GROUPS, bugs, bugs_by_symptom

PAGE = config.PAGES / "something-is-wrong.md"


def test_each_bug_of_the_gallery_stands_under_one_symptom():
    listed = Counter(place for places in GROUPS.values() for place in places.split())
    assert set(listed) == set(bugs())
    assert set(listed.values()) == {1}
    assert len(listed) > 90


def test_the_texts_are_those_of_the_gallery():
    (row,) = [row for row in bugs_by_symptom("hangs").rows if "#b01" in row[1]]
    assert row == (
        "it hangs",
        "[All ranks send first](bugs/lc1.md#b01)",
        "every rank's stack",
    )
    with pytest.raises(ValueError, match="symptom='cold' is none of hangs, slow"):
        bugs_by_symptom("cold")


def test_the_page_has_every_symptom():
    text = PAGE.read_text(encoding="utf-8")
    assert all(f"bugs_by_symptom symptom={symptom}\n" in text for symptom in GROUPS)
