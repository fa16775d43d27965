"""All questions of the interview: a list made of the pages that answer them.

Level and kind of each stand in questions.toml, by page and id.
"""

import re
import tomllib
from functools import cache
from pathlib import Path
from typing import NamedTuple

from ... import config
from ...tables import REGISTRY
from ...values import value

FACETS = Path(__file__).with_name("questions.toml")
LEVELS = ("basic", "usual", "deep")
KINDS = ("concept", "derive", "number", "code", "debug", "design")
QUESTION = re.compile(r'^\?\?\? question "(?P<title>.+)"$', re.MULTILINE)
ANCHOR = re.compile(r"^    \{: #(?P<anchor>[\w-]+) \}$", re.MULTILINE)


class Question(NamedTuple):
    """A question of a page, and the anchor of its bold answer."""

    page: str
    anchor: str
    title: str


def questions_of(page: str) -> list[Question]:
    """Those of one page, in its order."""
    text = (config.PAGES / "interview" / f"{page}.md").read_text(encoding="utf-8")
    found = []
    for match in QUESTION.finditer(text):
        anchor = ANCHOR.search(text, match.end())
        if anchor is None:
            raise ValueError(f"{page}: {match['title']!r} has no anchor")
        found.append(Question(page, anchor["anchor"], match["title"]))
    return found


@cache
def facets() -> dict[str, dict[str, str]]:
    """Of each page: "level kind" by anchor."""
    return tomllib.loads(FACETS.read_text(encoding="utf-8"))


def item(question: Question) -> str:
    """A link that a reader without scripts can follow."""
    page, anchor, title = question
    level, kind = facets()[page][anchor].split()
    title = title.replace("_", "\\_")
    return (
        f'- [{title}]({page}.md#{anchor}){{ data-level="{level}" data-kind="{kind}" }}'
    )


@REGISTRY
def interview_questions(page: str) -> list[str]:
    """Links to the questions of a page, each with its level and kind."""
    return [item(question) for question in questions_of(page)]


@value
def interview_count() -> int:
    """How many questions there are, of all pages."""
    return sum(len(found) for found in facets().values())
