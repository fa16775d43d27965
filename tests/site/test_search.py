"""The search of the built site: it finds, it keeps its order, and no query breaks it."""

import gzip
import json
import random
import re
from pathlib import Path

import pytest

from tests.testing.processes import wait_until

from .conftest import SITE

HOME = "en/"
QUESTIONS = {
    question: [pages] if isinstance(pages, str) else pages
    for question, pages in json.loads(
        Path(__file__).with_name("search_questions.json").read_text()
    ).items()
}
"""As people ask, with the page that answers; several where several are as good."""

INDEX = SITE / "en/search/search_index.json"
LARGEST = 250_000
"""Bytes of the index as a server sends it."""

ASK = """
const [queries, done] = arguments;
const config = JSON.parse(document.getElementById("__config").textContent);
const base = new URL(config.base, location);
const worker = new Worker(new URL(config.search, base));
const found = [];
worker.onerror = (event) => done({ error: event.message });
worker.onmessage = ({ data: { type, data } }) => {
  if (type === 3) found.push(data.items.map((parts) => parts.map((part) => part.location)));
  if (found.length === queries.length) done({ found });
  else worker.postMessage({ type: 2, data: queries[found.length] });
};
fetch(new URL("search/search_index.json", base))
  .then((answer) => answer.json())
  .then((data) => worker.postMessage({ type: 0, data }));
"""
"""Sets up the worker of a page as the page script does, and asks one after the other."""

TYPE = """
const [queries, done] = arguments;
const field = document.querySelector(".md-search__input");
const type = (text) => {
  field.value = text;
  field.dispatchEvent(new KeyboardEvent("keyup", { key: text.at(-1) || "a" }));
};
for (const query of queries) {
  const letters = [...query];
  for (let end = 1; end <= letters.length; end++) type(letters.slice(0, end).join(""));
  type("");
}
type("one-shot all-reduce");
setTimeout(done, 0);
"""
"""Types into the field letter by letter, and something to be found at last."""


def asked(browser, queries: list[str]) -> list[list[str]]:
    """The pages that each query finds, best first."""
    browser.open(HOME)
    answer = browser.driver.execute_async_script(ASK, queries)
    assert "error" not in answer, answer
    return [[parts[0] for parts in items] for items in answer["found"]]


def results(browser) -> list[str]:
    """The addresses in the list of results."""
    links = "[...document.querySelectorAll('.md-search-result__link')]"
    return browser.run(f"return {links}.map(a => a.getAttribute('href'))")


@pytest.fixture(scope="module")
def index() -> dict:
    """What the worker is given."""
    return json.loads(INDEX.read_text())["docs"]


def test_questions_lead_to_the_page_that_answers_them(browser):
    places = {}
    for question, found in zip(QUESTIONS, asked(browser, list(QUESTIONS)), strict=True):
        ranks = [found.index(page) for page in QUESTIONS[question] if page in found]
        places[question] = min(ranks, default=len(found))
    assert len(places) >= 80
    first = sum(place == 0 for place in places.values()) / len(places)
    in_three = sum(place < 3 for place in places.values()) / len(places)
    late = {question: place for question, place in places.items() if place}
    assert first >= 0.85, late
    assert in_three >= 0.98, late


def test_the_pages_of_the_questions_are_there():
    for question, pages in QUESTIONS.items():
        for page in pages:
            assert (SITE / "en" / page / "index.html").is_file(), (question, page)


def test_the_exact_title_of_a_lecture_page_leads_to_it(browser, index):
    lectures = [page for page in index["pages"] if page["room"] == 0]
    assert len(lectures) > 80
    found = asked(browser, [page["title"] for page in lectures])
    missed = {
        page["title"]: pages[:3]
        for page, pages in zip(lectures, found, strict=True)
        if page["at"] not in pages[:1]
    }
    assert missed == {}


def test_a_symbol_leads_to_its_lecture_first_and_then_to_its_reference(browser):
    symbols = {
        "ring_all_reduce": ("lc1-communication/ring-all-reduce/", "reference/comm/"),
        "PipelineRunner": (
            "lc5-pipeline-parallel/runner/", "reference/pipeline_parallel/",
        ),
        "FullyShardedDataParallel": ("lc3-zero/stage-3/", "reference/zero/"),
        "memory_per_device": ("planning/", "reference/plan/"),
        "ZeroOptimizer": ("lc3-zero/stage-1-and-2/", "reference/zero/"),
    }  # fmt: skip
    found = asked(browser, list(symbols))
    for (symbol, (lecture, reference)), pages in zip(
        symbols.items(), found, strict=True
    ):
        assert reference in pages, symbol
        assert pages.index(lecture) < pages.index(reference), symbol


def test_every_symbol_of_the_reference_is_found_in_its_room(browser, index):
    names = {}
    for page in index["pages"]:
        if page["at"].startswith("reference/") and page["at"] != "reference/":
            titles = [part[1] for part in page["sections"]]
            functions = [
                title for title in titles if re.fullmatch("[a-z]+_\\w+", title)
            ]
            names.update(dict.fromkeys(functions[:3], page["at"]))
    assert len(names) > 30
    found = asked(browser, list(names))
    missed = [n for n, pages in zip(names, found, strict=True) if names[n] not in pages]
    assert missed == []


def test_rooms_come_in_their_order(index):
    names = [room["name"] for room in index["rooms"]]
    weights = [room["weight"] for room in index["rooms"]]
    order = ["lectures", "interview", "bugs", "reference"]
    assert [name for name in names if name in order] == order
    assert weights == sorted(weights, reverse=True)


def test_the_index_is_small():
    assert len(gzip.compress(INDEX.read_bytes())) <= LARGEST


def test_the_index_has_the_pages_and_places_of_the_site(index):
    for page in index["pages"]:
        html = (SITE / "en" / page["at"] / "index.html").read_text()
        outer = ""
        for anchor, title, *_ in page["sections"]:
            if anchor == "=":
                anchor = outer = title
            elif anchor == ".":
                anchor = f"{outer}.{title}"
            assert not anchor or f'id="{anchor}"' in html, (page["at"], anchor)
    room = {page["at"] for page in index["pages"]}
    assert "verification/ledger/" not in room
    for folder in ("lc1-communication", "interview", "bugs", "reference"):
        assert any(at.startswith(folder) for at in room), folder


def test_the_index_has_no_text_of_figures_or_listings(index):
    """Labels of figures run together, and listings have statements."""
    for page in index["pages"]:
        for _, title, _, text, rest in page["sections"]:
            for words in (title, text, rest):
                assert not re.search(r"(?:[a-z]\d){4,}|\u00b6|Copied!", words), words
                assert not re.search(r"\bimport torch\b|\bdef \w+\(", words), words


def queries() -> list[str]:
    """Some 400: questions, their misspellings, digits, hyphens, operators."""
    draw = random.Random(0)
    made = list(QUESTIONS)
    for question in QUESTIONS:
        at = draw.randrange(len(question))
        made.append(question[:at] + question[at + 1 :])
        made.append(question[:at] + question[at : at + 2][::-1] + question[at + 2 :])
    made += [
        f"{word} {digit}"
        for word in ("zero", "stage", "llama", "")
        for digit in range(10)
    ]
    made += [f"{word}-" for word in ("zero", "all", "1f1b", "ring", "")]
    signs = "+-*~^:?!\"'()[]{}<>|\\/&%$#@=.,;_`"
    made += [f"{sign}ring" for sign in signs] + [f"ring {sign}" for sign in signs]
    made += ["constructor", "__proto__", "toString", "<b>bold</b>", "a" * 60, "\u03b1\u03b2",
             "\u5206\u5e03\u5f0f", "\U0001f600", "title:ring", "ring~99", "+ring -tree", '"', '"ring',
             "ring^", "ring^x", "*", "  ", "\\", "(?:", "[a-", "1e9", "0x3", "-1", "3.5"]  # fmt: skip
    return made


def test_no_query_breaks_the_search(browser):
    typed = queries()
    assert len(typed) >= 370
    browser.open(HOME)
    browser.driver.find_element("css selector", ".md-search__input").click()
    for begin in range(0, len(typed), 10):
        browser.driver.execute_async_script(TYPE, typed[begin : begin + 10])
        wait_until(
            lambda: "one-shot" in "".join(results(browser)[:1]),
            60,
            f"an answer after {typed[begin : begin + 10]}",
        )
    assert browser.complaints() == []


@pytest.mark.parametrize(
    "query", ["zero 3", "ZeRO-3", "stage 3", "llama 3", "all-to-all"]
)
def test_what_once_failed_is_found_key_by_key(browser, query):
    browser.open(HOME)
    field = browser.driver.find_element("css selector", ".md-search__input")
    field.click()
    for letter in query:
        field.send_keys(letter)
    wait_until(lambda: len(results(browser)) > 2, 30, "results")
    assert browser.complaints() == []


def test_a_result_is_text_with_its_words_marked(browser):
    browser.open(HOME)
    field = browser.driver.find_element("css selector", ".md-search__input")
    field.click()
    field.send_keys("grouped-query attention")
    wait_until(lambda: results(browser), 30, "results")
    list_ = "document.querySelector('.md-search-result__list')"
    assert browser.run(f"return {list_}.querySelectorAll('mark').length") > 0
    assert "&amp;" not in browser.run(f"return {list_}.textContent")
