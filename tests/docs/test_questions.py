"""The page of all interview questions: it lists each, with a level and a kind."""

import re

import pytest

from xtrain_docs import config
from xtrain_docs.lectures.interview import questions
from xtrain_docs.lectures.interview.questions import (
    KINDS,
    LEVELS,
    facets,
    interview_count,
    interview_questions,
    questions_of,
)

FOLDER = config.PAGES / "interview"
ASKING = [
    page.stem
    for page in sorted(FOLDER.glob("*.md"))
    if re.search(r"^\?\?\? question", page.read_text(), re.M)
]
PAGE = (FOLDER / "questions.md").read_text()
LONG_BOLD = ("lc4", "lc5")
"""Their bold answers have a number and a trade-off in them."""


def test_the_page_lists_every_page_that_asks():
    listed = re.findall(
        r'^## .+ \{#(\w+)\}\n\n```table interview_questions page="(\w+)"\n```$',
        PAGE,
        re.M,
    )
    assert sorted(listed) == [(page, page) for page in ASKING]


@pytest.mark.parametrize("page", ASKING)
def test_each_question_has_a_level_and_a_kind_and_no_other_has(page):
    text = (FOLDER / f"{page}.md").read_text()
    found = questions_of(page)
    assert len(found) == len(re.findall(r"^\?\?\?\+? question", text, re.M))
    assert [one.anchor for one in found] == list(facets()[page])
    for words in facets()[page].values():
        level, kind = words.split()
        assert level in LEVELS and kind in KINDS


def test_no_page_is_described_that_asks_nothing():
    assert sorted(facets()) == ASKING
    assert interview_count() == sum(len(questions_of(page)) for page in ASKING) > 100
    words = [words for found in facets().values() for words in found.values()]
    for part in (*LEVELS, *KINDS):
        assert sum(part in word.split() for word in words) >= 10, part


def test_an_item_is_a_link_with_its_facets():
    first, *_ = interview_questions("lc2")
    assert first == (
        "- [Why do we reduce the gradients and not the loss?](lc2.md#q24)"
        '{ data-level="basic" data-kind="concept" }'
    )


def test_a_question_without_an_anchor_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "interview").mkdir()
    (tmp_path / "interview/a.md").write_text('??? question "Why?"\n\n    **So.**\n')
    monkeypatch.setattr(questions.config, "PAGES", tmp_path)
    with pytest.raises(ValueError, match=r"a: 'Why\?' has no anchor"):
        questions_of("a")


def answers(page: str) -> list[tuple[str, str]]:
    """Anchor and following words of each question, up to its proof."""
    text = (FOLDER / f"{page}.md").read_text()
    parts = re.split(r"^    \{: #([\w-]+) \}$", text, flags=re.M)
    after = zip(parts[1::2], parts[2::2], strict=True)
    return [(anchor, words.split("Proof:")[0]) for anchor, words in after]


@pytest.mark.parametrize("page", [page for page in ASKING if page not in LONG_BOLD])
def test_a_number_that_was_computed_follows_the_bold_answer(page):
    for anchor, words in answers(page):
        paragraph = re.split(r"\n\s*\n", words.strip())[0]
        assert "{{" in paragraph, anchor


@pytest.mark.parametrize("page", LONG_BOLD)
def test_a_long_bold_answer_has_its_number(page):
    text = (FOLDER / f"{page}.md").read_text()
    bold = re.findall(r"^    (\*\*.+?\*\*)\n    \{: #[\w-]+ \}$", text, re.M | re.S)
    assert len(bold) == len(questions_of(page))
    without = [words[:60] for words in bold if "{{" not in words]
    assert len(without) <= 4, without
