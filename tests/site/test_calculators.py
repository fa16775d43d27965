"""Calculators in a headless Chromium: the page's Python says what ours says."""

import json
import random
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.random_values import random_values
from tests.site.conftest import SITE
from tests.testing.processes import wait_until
from xtrain_docs.calculators.answers import CALCULATORS, answer
from xtrain_docs.calculators.forms import Upload

PAGES = {
    "memory": "en/planning/memory-calculator/",
    "best": "en/",
    "layouts": "en/planning/layout-planner/",
    "pipeline": "en/planning/pipeline-explorer/",
}
PYTHON = SITE / "en/assets/pyodide/pyodide.asm.wasm"
WORKER = "calculator-worker.mjs"
"""What starts Python. Its own requests are not among those of the page."""
STARTS = 90.0
"""Seconds until the first answer on a slow machine: Python is loaded and compiled."""

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).is_file(), reason="built without Python for the browser"
)
SAYS = "return arguments[0].querySelector('.xt-status').textContent"
SAME = """
const made = document.createElement('div');
made.innerHTML = arguments[1];
const read = (answer) => { // a timeline by its actions: the page zooms it
  const copy = answer.cloneNode(true);
  const cells = [...copy.querySelectorAll('svg.xs rect[style*=opacity]')];
  copy.querySelectorAll('.xt-schedule-bar, .xt-scroll:has(svg.xs)').forEach((e) => e.remove());
  return cells.map((cell) => cell.getAttribute('style')).join() + copy.innerHTML;
};
return read(arguments[0].querySelector('.xt-answer')) === read(made);
"""
OUTLINE = """
const at = document.activeElement, style = getComputedStyle(at);
const ring = style.outlineStyle === 'none' ? 0 : parseFloat(style.outlineWidth);
return [at.name || at.tagName, ring];
"""
ENTER = """
for (const [name, value] of Object.entries(arguments[1]))
  arguments[0].querySelector('form').elements[name].value = value;
arguments[0].querySelector('.xt-status').textContent = '';
arguments[0].querySelector('form').requestSubmit();
"""


def element(browser, name):
    return browser.driver.find_element(By.ID, f"calculator-{name}")


def answered(browser, calculator) -> str:
    """What the calculator says once it has an answer, or a complaint."""
    return wait_until(
        lambda: (
            (says := browser.run(SAYS, calculator))
            and not says.startswith(("Loading", "Computing"))
            and says
        ),
        STARTS,
        "an answer",
    )


def of_python(name: str, given: dict[str, str]) -> tuple[str, str]:
    """The answer here, or why there is none."""
    try:
        return answer(name, given), ""
    except ValueError as problem:
        return "", str(problem)


@pytest.mark.parametrize("name", PAGES)
def test_the_page_computes_what_python_computes(browser, name):
    browser.open(PAGES[name])
    assert not [address for address in browser.requests() if WORKER in address]
    calculator = element(browser, name)
    draw, computed, refused = random.Random(7), 0, 0
    while computed < 4:
        given = random_values(CALCULATORS[name].fields, draw)
        expected, refusal = of_python(name, given)
        refused += bool(refusal)
        if refusal and refused > 3:  # most layouts break a rule; some are enough
            continue
        browser.run(ENTER, calculator, given)
        says = answered(browser, calculator)
        if refusal:
            assert says == refusal
            continue
        assert says.startswith("Computed by Python in this page")
        assert browser.run(SAME, calculator, expected)
        computed += 1
    assert browser.complaints() == []
    requests = browser.requests()
    assert any(address.endswith(WORKER) for address in requests)
    here = (browser.root, "data:", "about:", "blob:")
    assert [address for address in requests if not address.startswith(here)] == []


def test_by_keyboard_and_by_link(browser):
    browser.open(PAGES["pipeline"])
    calculator = element(browser, "pipeline")
    field = calculator.find_element(By.NAME, "micro_batches")
    field.clear()
    field.send_keys("5", Keys.ENTER)
    answered(browser, calculator)
    link = browser.driver.current_url
    assert "micro_batches=5" in link
    browser.open(link.removeprefix(f"{browser.root}/"))
    calculator = element(browser, "pipeline")
    assert answered(browser, calculator).startswith("Computed")
    value = calculator.find_element(By.NAME, "micro_batches").get_attribute("value")
    assert value == "5"
    assert browser.run(SAME, calculator, answer("pipeline", {"micro_batches": "5"}))


def test_times_below_one_are_told_as_they_are(browser):
    link = "&".join(f"{part}=0.01" for part in
                    ("forward", "backward_input", "backward_weight"))  # fmt: skip
    browser.open(f"{PAGES['pipeline']}?calculator=pipeline&{link}")
    answered(browser, element(browser, "pipeline"))
    find = browser.driver.find_element
    wait_until(
        lambda: browser.run("return !!document.querySelector('.xt-schedule-bar')"),
        what="the bar of the timeline",
    )
    find(By.CSS_SELECTOR, ".xt-schedules").send_keys(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    said = find(By.CSS_SELECTOR, ".xt-schedule-bar output").text
    assert said == "rank 0, 0.01 to 0.02: forward of micro-batch 1 on stage 0"


FETCH = """
const done = arguments[arguments.length - 1];
fetch(arguments[0], {mode: 'no-cors'}).then(() => done(true), () => done(false));
"""


def test_it_answers_where_no_other_host_can_be_reached(browser):
    browser.open(PAGES["memory"])
    other = browser.root.replace("127.0.0.1", "localhost")
    reached = [
        browser.driver.execute_async_script(FETCH, f"{host}/en/index.html")
        for host in (browser.root, other)
    ]
    assert reached == [True, False]
    browser.complaints()  # the second address, which was to fail
    calculator = element(browser, "memory")
    browser.run(ENTER, calculator, {"data": "8"})
    assert answered(browser, calculator).startswith("Computed by Python in this page")
    assert browser.run(SAME, calculator, answer("memory", {"data": "8"}))
    assert browser.complaints() == []


def test_every_field_is_reached_by_keyboard_and_shows_it(browser):
    browser.open(PAGES["memory"])
    calculator = element(browser, "memory")
    fields = CALCULATORS["memory"].fields
    first = calculator.find_element(By.NAME, fields[0].name)
    browser.run("arguments[0].focus({focusVisible: true})", first)
    seen = []
    for _ in range(len(fields) + 1):
        name, outline = browser.run(OUTLINE)
        seen.append(name)
        assert outline >= 2, name
        ActionChains(browser.driver).send_keys(Keys.TAB).perform()
    names = ["INPUT" if isinstance(f, Upload) else f.name for f in fields]
    assert seen == [*names, "BUTTON"]


TAKE = """
const [calculator, text, done] = arguments;
const input = calculator.querySelector("[type=file]");
const files = new DataTransfer();
files.items.add(new File([text], "config.json"));
input.files = files.files;
input.dispatchEvent(new Event("change", { bubbles: true }));
setTimeout(() => { calculator.querySelector("form").requestSubmit(); done(); }, 200);
"""


def test_a_config_json_of_the_readers_is_computed_and_stays_in_the_link(browser):
    entries = {
        "model_type": "llama", "vocab_size": 32_000, "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 22,
        "num_attention_heads": 32, "num_key_value_heads": 4,
    }  # fmt: skip
    browser.open(PAGES["memory"])
    calculator = element(browser, "memory")
    text = json.dumps(entries | {"architectures": ["Any"]})
    browser.driver.execute_async_script(TAKE, calculator, text)
    answered(browser, calculator)
    expected = answer("memory", {"config": json.dumps(entries)})
    assert browser.run(SAME, calculator, expected)
    browser.open(browser.driver.current_url.removeprefix(f"{browser.root}/"))
    calculator = element(browser, "memory")
    assert answered(browser, calculator).startswith("Computed")
    assert browser.run(SAME, calculator, expected)


def test_a_mistake_is_told_and_the_answer_stays(browser):
    browser.open(PAGES["pipeline"])
    calculator = element(browser, "pipeline")
    before = browser.run(
        "return arguments[0].querySelector('.xt-answer').innerHTML", calculator
    )
    given = {"schedule": "dualpipe", "ranks": "3"}
    browser.run(ENTER, calculator, given)
    says = answered(browser, calculator)
    with pytest.raises(ValueError, match="dualpipe") as problem:
        answer("pipeline", given)
    assert says == str(problem.value)
    after = browser.run(
        "return arguments[0].querySelector('.xt-answer').innerHTML", calculator
    )
    assert after == before
