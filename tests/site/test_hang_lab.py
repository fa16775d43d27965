"""The hang lab in a browser: answers are judged by keys, on a phone, unscripted."""

import pytest
from selenium.webdriver.common.keys import Keys

from tests.site.conftest import SITE
from tests.testing.processes import wait_until
from xtrain.practice.hang_lab import lab

PAGE = "en/labs/hang-lab/"
JOB = lab.fault("3")
FORM = f"const form = document.querySelector('#{JOB.job} ~ form');"
SAYS = FORM + "return form.querySelector('[role=status]').textContent"
OPEN = FORM + "return form.parentElement.querySelector('details').open"

pytestmark = pytest.mark.skipif(
    not (SITE / PAGE).is_dir(), reason="built without the hang lab"
)


def choose(browser, name, value):
    """By keys alone: the first letters of an option choose it."""
    select = browser.driver.find_element(
        "css selector", f"#{JOB.job} ~ form [name={name}]"
    )
    select.send_keys(value)
    return select


def test_an_answer_is_judged_and_the_right_one_opens_its_reason(browser):
    browser.open(PAGE)
    wait_until(lambda: browser.run(FORM + "return !form.hidden"))
    choose(browser, "rank", "1")
    choose(browser, "call", "barrier").send_keys(Keys.TAB, Keys.TAB)
    button = browser.driver.find_element("css selector", f"#{JOB.job} ~ form button")
    button.send_keys(Keys.ENTER)
    assert browser.run(SAYS) == lab.judge(JOB, "1", "barrier").words
    choose(browser, "rank", "0")
    choose(browser, "call", "recv")
    button.send_keys(Keys.SPACE)
    assert browser.run(SAYS) == lab.judge(JOB, "0", "recv").words
    assert not browser.run(OPEN)
    choose(browser, "call", "barrier")
    button.click()
    assert browser.run(SAYS).startswith("Right.") and browser.run(OPEN)
    assert browser.complaints() == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_forms_fit_a_phone(browser, dark):
    browser.screen(320, 640, dark)
    browser.open(PAGE)
    wait_until(lambda: browser.run(FORM + "return !form.hidden"))
    wide = (
        "return [...document.querySelectorAll('form[data-call] *')]"
        ".filter((e) => e.getBoundingClientRect().right > innerWidth).length"
    )
    assert browser.run(wide) == 0
    assert browser.run("return document.documentElement.scrollWidth") <= 320
    browser.screen(1280, 900)


def test_without_scripts_the_answers_are_folded_parts(browser):
    driver = browser.driver
    driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    try:
        driver.get(f"{browser.root}/{PAGE}")
        forms = driver.find_elements("css selector", "form[data-call]")
        assert len(forms) == len(lab.faults())
        assert not any(form.is_displayed() for form in forms)
        driver.find_element("css selector", f"#{JOB.job} ~ details summary").click()
        answer = driver.find_element("css selector", f"#{JOB.job} ~ details")
        assert "A collective stands outside" in answer.text
    finally:
        driver.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
