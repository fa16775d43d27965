"""The index of the search: which pages are in it, with how many of their words.

search/search_index.json is what Material's page script loads when somebody goes to the
search field, and hands to the worker (theme/assets/search):

    {"config": what the page script reads to mark words on a page,
     "docs": {"synonyms": {"oom": ["out of memory"]},
              "rooms": [{"name": "lectures", "weight": 1.0}, ...],
              "pages": [{"at": "lc3-zero/stage-3/", "title": "ZeRO-3", "room": 0,
                         "about": "its description", "trail": ["Lectures", "3 · ZeRO"],
                         "sections": [["anchor", "title", "names that code defines",
                                       "text", "words of its rest"], ...]}]}}

Every page of the site is in it but those that say `search: {exclude: true}`. Of a page
of the reference it has each symbol with the first sentence that describes it, unless
that is "Bases:" or the like. Anchors that follow from
titles are left out (`shortened`).
"""

import json
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.plugins import BasePlugin

from .sections import Section, sections

SYNONYMS = Path(__file__).with_name("synonyms.json")
WORDS = re.compile(r"[A-Za-z][\w-]{2,}")
SENTENCE = re.compile(r".+?[.:;](?=\s|$)")


COMMON = 0.15
"""A word on more than this part of all pages says little about one of them."""


class Room(NamedTuple):
    """Pages of one kind: where they are, how much they weigh, how much of each."""

    name: str
    begins: tuple[str, ...]
    weight: float
    letters: int
    """Of the text of a section; beyond them only words that are new to the page."""


ROOMS = (
    Room("lectures", ("",), 1.0, 200),
    Room("planning", ("planning/", "cluster/", "labs/"), 0.9, 200),
    Room("interview", ("interview/", "whiteboard/", "tell-it/"), 0.75, 160),
    Room("bugs", ("bugs/",), 0.65, 160),
    Room(
        "evidence",
        ("benchmarks/", "errata/", "house/", "support-matrix/", "verification/"),
        0.5,
        120,
    ),
    Room("reference", ("reference/",), 0.3, 110),
)
"""In the order in which equally good answers stand; the first takes all other pages."""


def room(address: str) -> int:
    """The number of a page's room."""
    for i, one in enumerate(ROOMS[1:], start=1):
        if address.startswith(one.begins):
            return i
    return 0


def halves(text: str, letters: int, had: set[str]) -> tuple[str, list[str]]:
    """The beginning of a text, and words of its rest that the page `had` not before."""
    end = len(text)
    if end > letters:
        end = max(text.rfind(" ", 0, letters + 1), 0)
    head, rest = text[:end], text[end:]
    had.update(WORDS.findall(head.lower()))
    new = [
        word for word in dict.fromkeys(WORDS.findall(rest.lower())) if word not in had
    ]
    had.update(new)
    return head, new


LINKS = "interview"
"""The section of a lecture's page that repeats questions of another page: a heading."""


def described(text: str) -> str:
    """The first sentence about a symbol; nothing if it only leads to what follows."""
    first = (SENTENCE.match(text) or [text])[0]
    return "" if first.endswith(":") or first.startswith("Taught in ") else first


def entry(
    address: str, title: str, about: str, trail: list[str], found: list[Section]
) -> dict[str, Any]:
    """A page as the index has it."""
    number = room(address)
    one = ROOMS[number]
    had: set[str] = set()
    parts = []
    for section in found:
        text = section.text
        if one.name == "reference":
            text = described(text)[: one.letters]
        elif one.name == "lectures" and section.anchor == LINKS:
            text = ""
        head, rest = halves(text, one.letters, had)
        names = " ".join(dict.fromkeys(section.names))
        parts.append([section.anchor, section.title, names, head, " ".join(rest)])
    page = {"at": address, "title": title, "about": about, "trail": trail}
    return {**page, "room": number, "sections": parts}


def without_common(pages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The pages, and of the rests of their texts what tells pages apart."""
    on_pages = Counter(word for page in pages for word in _words(page))
    common = COMMON * len(pages)

    def telling(rest: str) -> str:
        return " ".join(word for word in rest.split() if on_pages[word] <= common)

    return [
        {
            **page,
            "sections": [[*part[:4], telling(part[4])] for part in page["sections"]],
        }
        for page in pages
    ]


def shortened(sections: list[list[str]]) -> Iterator[list[str]]:
    """The sections, and "=" for an anchor that is its title.

    "." is an anchor inside the last such one: of `f` below `xtrain.comm.ring`
    xtrain.comm.ring.f. The worker writes both out again.
    """
    outer = ""
    for anchor, title, *words in sections:
        if title and anchor == title:
            outer, anchor = anchor, "="
        elif outer and anchor == f"{outer}.{title}":
            anchor = "."
        yield [anchor, title, *words]


def _words(page: dict[str, Any]) -> set[str]:
    texts = (f"{head} {rest}" for _, _, _, head, rest in page["sections"])
    return set(WORDS.findall(" ".join(texts).lower()))


class SearchIndex(BasePlugin):
    """Reads every page as it is rendered, and writes the index over Material's."""

    def __init__(self) -> None:
        self.pages: list[dict[str, Any]] = []

    def on_page_context(self, context: Any, /, *, page: Any, **_: Any) -> Any:
        """MkDocs calls this with every page."""
        if not (page.meta.get("search") or {}).get("exclude"):
            about = page.meta.get("description", "")
            title = page.meta.get("title") or page.title
            trail = [one.title for one in reversed(page.ancestors)]
            trail += [page.title] if page.title != title else []
            found = sections(page.content)
            self.pages.append(entry(page.url, title, about, trail, found))
        return context

    def on_post_build(self, *, config: Any) -> None:
        """MkDocs calls this when all files are there."""
        made = {
            "config": {"lang": ["en"], "separator": r"[\s\-,:!?()/\"`]+"},
            "docs": index(self.pages),
        }
        path = Path(config.site_dir) / "search/search_index.json"
        text = json.dumps(made, ensure_ascii=False, separators=(",", ":"))
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


def index(pages: list[dict[str, Any]]) -> dict[str, Any]:
    """What the worker is given."""
    told = [
        {**page, "sections": list(shortened(page["sections"]))}
        for page in without_common(pages)
    ]
    return {
        "synonyms": json.loads(SYNONYMS.read_text()),
        "rooms": [{"name": one.name, "weight": one.weight} for one in ROOMS],
        "pages": told,
    }
