"""The interview's pages in a browser: the sheet on one page, and the questions."""

import base64
import json
import re

import pytest

from tests.testing.processes import wait_until

SHEET, QUESTIONS = "en/interview/formulas/", "en/interview/questions/"
SHOWN = "return document.querySelectorAll('.xt-questions li:not([hidden])').length"
STATUS = "return document.querySelector('.xt-q-status').textContent"
CHOOSE = """
const field = document.querySelector(`.xt-q-bar [name=${arguments[0]}]`);
field.value = arguments[1];
field.dispatchEvent(new Event("input", { bubbles: true }));
"""
PRESS = """
document.activeElement.dispatchEvent(
  new KeyboardEvent("keydown", { key: arguments[0], bubbles: true, cancelable: true }));
"""
CARD = "return document.querySelector('.xt-q-card h2').textContent"
STORED = "return JSON.parse(localStorage.getItem('xtrain.questions') ?? '{}')"
CLICK = """
[...document.querySelectorAll("button")]
  .find((button) => button.textContent === arguments[0]).click();
"""


@pytest.fixture
def asked(browser):
    """The browser on the page of questions, with nothing known."""
    browser.open(QUESTIONS)
    browser.run("localStorage.removeItem('xtrain.questions')")
    browser.open(QUESTIONS)
    wait_until(lambda: browser.run("return !!document.querySelector('.xt-q-bar')"))
    return browser


def printed(browser) -> list[tuple[float, float]]:
    """Width and height of each page of the printed document, in points."""
    options = {"preferCSSPageSize": True}
    pdf = browser.driver.execute_cdp_cmd("Page.printToPDF", options)["data"]
    return [
        (float(width), float(height))
        for width, height in re.findall(
            rb"/MediaBox \[0 0 ([\d.]+) ([\d.]+)\]", base64.b64decode(pdf)
        )
    ]


def test_the_formula_sheet_prints_as_one_page(browser):
    browser.open(SHEET)
    assert browser.run("return document.querySelectorAll('.xt-sheet tr').length") > 50
    (page,) = printed(browser)
    assert page == pytest.approx((595, 842), abs=1)  # A4
    browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    try:
        small = browser.run(
            "return Math.min(...[...document.querySelectorAll('.xt-sheet td')]"
            ".map((cell) => parseFloat(getComputedStyle(cell).fontSize)))"
        )
    finally:
        browser.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert small * 0.75 >= 6.4  # points


def test_without_scripts_every_question_is_a_link(browser):
    driver = browser.driver
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(f"{browser.root}/{QUESTIONS}")
        links = driver.find_elements("css selector", ".xt-questions li > a[data-level]")
        assert len(links) > 100
        assert all("#" in link.get_dom_attribute("href") for link in links[::20])
        assert not driver.find_elements("css selector", ".xt-q-bar")
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})


def test_questions_are_filtered(asked):
    total = asked.run(SHOWN)
    assert f"{total} of {total} questions" in asked.run(STATUS)
    asked.run(CHOOSE, "lecture", "lc3")
    assert asked.run(SHOWN) == 17
    heads = "return [...document.querySelectorAll('.xt-questions h2')]"
    assert len(asked.run(f"{heads}.filter((head) => !head.hidden)")) == 1
    asked.run(CHOOSE, "level", "basic")
    few = asked.run(SHOWN)
    assert 0 < few < 17
    asked.run(CHOOSE, "words", "adamw")
    assert asked.run(SHOWN) == 1
    asked.run(CHOOSE, "words", "no question has these")
    assert asked.run(SHOWN) == 0
    asked.open(QUESTIONS + "?level=deep&kind=debug")
    wait_until(lambda: asked.run("return !!document.querySelector('.xt-q-bar')"))
    assert 0 < asked.run(SHOWN) < total / 4


def test_an_answer_is_loaded_when_it_is_asked_for(asked):
    asked.requests()
    link = asked.driver.find_element("css selector", "a[href$='#q2']")
    assert link.get_attribute("aria-expanded") == "false"
    link.click()
    wait_until(
        lambda: asked.run("return !!document.querySelector('.xt-q-answer math')")
    )
    assert link.get_attribute("aria-expanded") == "true"
    requests = [one for one in asked.requests() if "/interview/" in one]
    assert len(requests) == 1 and requests[0].endswith("/interview/lc1/")
    text = asked.run("return document.querySelector('.xt-q-answer').textContent")
    assert "reduce-scatter" in text and "Proof:" in text
    dead = asked.run(
        "return [...document.querySelectorAll('.xt-q-answer a')].map((a) => a.href)"
        ".filter((url) => url.includes('/interview/questions/'))"
    )
    assert dead == []  # addresses are those of the page it comes from
    asked.driver.find_element("css selector", "a[href$='#q3']").click()
    wait_until(
        lambda: asked.run(
            "return document.querySelectorAll('.xt-q-answer').length === 2"
        )
    )
    assert [one for one in asked.requests() if "/interview/" in one] == []
    link.click()
    assert asked.run("return document.querySelectorAll('.xt-q-answer').length") == 1
    assert asked.complaints() == []


def test_flash_cards_are_driven_by_keys(asked):
    asked.run(CHOOSE, "lecture", "planning")
    asked.run(CLICK, "Flash cards")
    first = asked.run(CARD)
    asked.run(PRESS, "ArrowRight")
    second = asked.run(CARD)
    assert first != second
    asked.run(PRESS, "ArrowLeft")
    assert asked.run(CARD) == first
    asked.run(PRESS, " ")
    wait_until(
        lambda: asked.run("return !!document.querySelector('.xt-q-card .xt-q-answer')")
    )
    asked.run(PRESS, "3")
    assert asked.run(CARD) == second
    asked.run(PRESS, "1")
    assert sorted(asked.run(STORED).values()) == [1, 3]
    asked.run("document.querySelector('.xt-q-card').close()")
    wait_until(lambda: "1 known" in asked.run(STATUS))
    asked.run(CHOOSE, "known", "3")
    assert asked.run(SHOWN) == 1
    asked.open(QUESTIONS)  # it is kept
    wait_until(lambda: asked.run("return !!document.querySelector('li[data-known]')"))
    assert asked.run("return document.querySelectorAll('li[data-known]').length") == 2


IMPORT = """
const file = new File([arguments[0]], "a.json");
const box = new DataTransfer();
box.items.add(file);
const field = document.querySelector(".xt-q-actions input[type=file]");
field.files = box.files;
field.dispatchEvent(new Event("change"));
"""


def test_grades_are_imported_and_what_is_not_a_grade_is_refused(asked):
    given = {"lc1#q2": 3, "lc1#q3": 9, "lc1#none": 1, "__proto__": 2}
    asked.run(IMPORT, json.dumps({"xtrain": "questions", "known": given}))
    wait_until(lambda: "1 grades imported" in asked.run(STATUS))
    assert asked.run(STORED) == {"lc1#q2": 3}
    for text in ("", "[1", "null", '{"known": {"lc1#q2": 1}}'):
        asked.run(IMPORT, text)
        wait_until(lambda: "no grades" in asked.run(STATUS))
        assert asked.run(STORED) == {"lc1#q2": 3}
        asked.run(CHOOSE, "words", "")


EXPORT = """
window.kept = null;
URL.createObjectURL = (blob) => {
  blob.text().then((text) => { window.kept = text; });
  return "#";
};
"""


def test_grades_are_exported_as_they_are_imported(asked):
    asked.run(IMPORT, json.dumps({"xtrain": "questions", "known": {"lc2#q24": 2}}))
    wait_until(lambda: asked.run(STORED) == {"lc2#q24": 2})
    asked.run(EXPORT)
    asked.run(CLICK, "Export grades")
    wait_until(lambda: asked.run("return window.kept"))
    found = json.loads(asked.run("return window.kept"))
    assert found == {"xtrain": "questions", "known": {"lc2#q24": 2}}


def test_print_shows_the_questions_of_the_filter(asked):
    whole = len(printed(asked))
    asked.run(CHOOSE, "lecture", "planning")
    assert len(printed(asked)) == 1 < whole
