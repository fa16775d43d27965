"""The navigation, and where a lecture leads.

That links lead somewhere the strict build checks, and tests/site of the built pages.
"""

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.rendering import site_settings
from xtrain_docs import config
from xtrain_docs.tables.home import BESIDE, lecture_links

TABS = ["Home", "Lectures", "Math", "Interview", "Evidence", "Reference"]
PAGES = {
    path.relative_to(config.PAGES).as_posix(): path
    for suffix in ("md", "py")
    for path in sorted(config.PAGES.rglob(f"*.{suffix}"))
}
GENERATED = ("reference/", "verification/ledger")
WRITTEN = sorted(name for name in PAGES if not name.startswith(GENERATED))
"""What is committed; the build adds the rest (docs/en/.gitignore)."""
LECTURES = [name for name in WRITTEN if re.fullmatch(r"lc\d-[\w-]+/index\.md", name)]
SETTINGS = site_settings()


def listed(nav: Any) -> Iterator[str]:
    """The pages of a navigation, in its order."""
    if isinstance(nav, str):
        yield nav
    elif isinstance(nav, dict):
        nav = list(nav.values())
    if isinstance(nav, list):
        for entry in nav:
            yield from listed(entry)


def tab(name: str) -> list[str]:
    """The pages of one tab."""
    (found,) = [entry[name] for entry in SETTINGS["nav"] if name in entry]
    return list(listed(found))


def test_the_navigation_names_each_written_page_once():
    names = list(listed(SETTINGS["nav"]))
    assert [name for name in names if names.count(name) > 1] == []
    written = [name for name in names if not name.startswith(GENERATED)]
    assert [name for name in written if name not in WRITTEN] == []
    assert [name for name in WRITTEN if name not in names] == []


def test_tabs_are_kinds_of_pages_and_few():
    assert [next(iter(entry)) for entry in SETTINGS["nav"]] == TABS
    assert len(TABS) <= 7
    for name in WRITTEN:
        folder = name.partition("/")[0]
        assert folder != "planning" or name in tab("Math")
        assert not folder.startswith("lc") or name in tab("Lectures")
        assert folder not in ("interview", "bugs") or name in tab("Interview")
        assert folder not in ("errata", "benchmarks") or name in tab("Evidence")


NOT_YET = {"lc8": ("errata",)}
"""The notes that this grew from have no such lecture."""


@pytest.mark.parametrize("index", LECTURES)
def test_a_lecture_leads_to_its_questions_bugs_errata_races_and_numbers(index):
    lecture = index.partition("-")[0]
    assert f"```table lecture_links lecture={lecture}\n" in PAGES[index].read_text()
    rows = lecture_links(lecture).rows
    without = NOT_YET.get(lecture, ())
    wanted = [name for folder, name, *_ in BESIDE if folder not in without]
    assert [row[0] for row in rows] == [*wanted, "Math"]
    shown = " ".join(row[1] for row in rows)
    for folder in {"interview", "bugs", "errata", "benchmarks"} - {*without}:
        assert f"](/{folder}/{lecture}.md)" in shown
    assert "](/planning/index.md)" in shown
