"""The navigation and the links between pages, read from their sources."""

import posixpath
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.docs.rendering import site_settings
from xtrain_docs import config, fences
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
LINK = re.compile(r"(?<!!)\]\(<?([^)\s>]+)>?\)|^\[[^\]]+\]:\s*(\S+)$", re.MULTILINE)


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


# --------------------------------------------------------------------------- links


def links(text: str) -> list[str]:
    """Addresses that a page's words link to, less those of other sites and of code."""
    lines = text.splitlines()
    for fence in fences.fences(lines):  # captions of figures and tables stay
        if fence.info.split(" ")[0] not in ("figure", "table", "trace"):
            lines[fence.start : fence.end + 1] = [""] * (fence.end + 1 - fence.start)
    words = re.sub(r"(`+)(?!`).*?(?<!`)\1(?!`)", "", "\n".join(lines))
    found = [a or b for a, b in LINK.findall(words)]
    return [link for link in found if not re.match(r"[a-z]+:", link)]


def anchors(text: str) -> set[str]:
    """Names that a page gives to its parts, and those that its headings get."""
    named = set(re.findall(r"\{[^}]*#([\w-]+)[^}]*\}", text))
    named |= set(re.findall(r'\bid="([\w-]+)"', text))
    plain = re.findall(r"^#{1,6} ([^{\n]+)$", text, re.MULTILINE)
    return named | {re.sub(r"[^\w]+", "-", line.lower()).strip("-") for line in plain}


def dead(name: str, text: str, pages: dict[str, str]) -> list[str]:
    """Links of a page that lead nowhere."""
    problems = []
    for link in links(text):
        address, _, anchor = re.sub(r"\?[^#]*", "", link).partition("#")
        target = name
        if address:
            place = posixpath.join(posixpath.dirname(name), address)
            target = posixpath.normpath(place)
            if address.startswith("/"):
                target = address[1:]
        if target.startswith(GENERATED):
            continue
        if target not in pages:
            problems.append(f"{name}: {link}: no such page")
        elif anchor and anchor not in anchors(pages[target]):
            problems.append(f"{name}: {link}: no such part")
    return problems


def test_every_link_between_pages_leads_somewhere():
    texts = {name: PAGES[name].read_text() for name in WRITTEN}
    assert sum(len(links(text)) for text in texts.values()) > 500
    assert [p for name, text in texts.items() for p in dead(name, text, texts)] == []


@pytest.mark.parametrize(
    ("words", "problems"),
    [
        ("[a](b.md) [a](../a/b.md#there) [a](#here) `[a](gone.md)`\n\n## Here", 0),
        ("[a](gone.md)", 1),
        ("[a](../8/next.md)", 1),
        ("[a](b.md#gone)", 1),
        ("[a](#gone)", 1),
        ("[a][b]\n\n[b]: gone.md", 1),
        ("```table some\n[a](gone.md)\n```", 1),
        ("```text\n[a](gone.md)\n```\n[a](https://b.c/d.md) [a](test:b.py::c)", 0),
    ],
)
def test_a_dead_link_is_found(words, problems):
    pages = {"a/a.md": words, "a/b.md": "## B {#there}\n"}
    assert len(dead("a/a.md", words, pages)) == problems


NOT_YET = {"lc8": ("errata", "benchmarks")}
"""The notes that this grew from do not have it; its races are to come."""


@pytest.mark.parametrize("index", LECTURES)
def test_a_lecture_leads_to_its_questions_bugs_errata_races_and_numbers(index):
    lecture = index.partition("-")[0]
    assert f"```table lecture_links lecture={lecture}\n" in PAGES[index].read_text()
    rows = lecture_links(lecture).rows
    without = NOT_YET.get(lecture, ())
    wanted = [name for folder, name, *_ in BESIDE if folder not in without]
    assert [row[0] for row in rows] == [*wanted, "Math"]
    texts = {name: PAGES[name].read_text() for name in WRITTEN}
    shown = " ".join(row[1] for row in rows)
    for folder in {"interview", "bugs", "errata", "benchmarks"} - {*without}:
        assert f"](/{folder}/{lecture}.md)" in shown
    assert "](/planning/index.md)" in shown
    assert dead(index, shown, texts) == []
