"""Drills written in a headless Chromium: editor, verdict, drawings, what is kept."""

import json
from pathlib import Path

import pytest
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.practice.test_checking import FILES, SAID
from tests.site.conftest import SITE
from tests.testing.processes import wait_until
from xtrain.practice import drill
from xtrain.practice.judging import mistakes_of
from xtrain.practice.page import IN_PAGE

PAGE = "en/practise/"
PYTHON = SITE / "en/assets/pyodide/pyodide.asm.wasm"
EDITOR = SITE / "en/assets/editor/editor.mjs"
STARTS = 90.0
"""Seconds until the first answer on a slow machine: Python is loaded and compiled."""
HEAVY = ("drill-worker", "drill-desk", "editor/", "pyodide/", "drills/")
ENDLESS = """def gpipe(ranks, micro_batches):
    return sum(iter(int, 1))
"""
"""A loop inside C: only the end of its worker ends it."""

IN_THE_PAGE = {
    "gpipe__prints_without_end": "(line ",  # which limit is first depends on the host
    "one_f_one_b__names": "ValueError: max() ",
    "online_softmax__memory": "a tensor of 16,777,216 numbers",
}
"""What it tells where its limits, or Python's words, are other ones."""

pytestmark = pytest.mark.skipif(
    not (Path(PYTHON).is_file() and Path(EDITOR).is_file()),
    reason="built without Python for the browser or without its editor",
)

SAYS = "return document.querySelector('.xt-says-verdict')?.textContent"
TEXT = (
    "return [...document.querySelectorAll('.cm-line')].map((l) => l.textContent)"
    ".join('\\n')"
)
STORED = "return localStorage.getItem('xtrain-drill:' + arguments[0])"


@pytest.fixture
def page(browser):
    """The page of a reader who has written nothing yet."""
    browser.open(PAGE)
    browser.run("localStorage.clear()")
    yield browser
    browser.run("localStorage.clear()")
    browser.screen(1280, 900)


def find(browser, selector):
    return browser.driver.find_element(By.CSS_SELECTOR, selector)


def button(browser, words):
    path = f"//*[contains(@class, 'xt-desk')]//button[starts-with(., '{words}')]"
    return browser.driver.find_element(By.XPATH, path)


def begin(browser, name, level="body"):
    """Open a drill afresh, as a link to it does."""
    entry = json.dumps({"level": level})
    browser.run(f"localStorage['xtrain-drill:{name}'] ??= arguments[0]", entry)
    browser.open(f"{PAGE}#{name}")
    wait_until(lambda: browser.run("return !!document.querySelector('.cm-content')"))


def keys(browser, *pressed):
    ActionChains(browser.driver).send_keys(*pressed).perform()


def paste(browser, text):
    """Replace the whole file, as one edit."""
    find(browser, ".cm-content").click()
    with_control(browser, "a")
    browser.run("document.execCommand('insertText', false, arguments[0])", text)


def with_control(browser, key):
    chain = ActionChains(browser.driver).key_down(Keys.CONTROL)
    chain.send_keys(key).key_up(Keys.CONTROL).perform()


def answered(browser) -> str:
    """What is said once there is an answer."""
    waits = ("Loading", "Checking")
    return wait_until(
        lambda: (says := browser.run(SAYS)) and not says.startswith(waits) and says,
        STARTS,
        "an answer",
    )


def back(browser):
    """To the list, from wherever the page is scrolled to."""
    browser.run("scrollTo(0, 0)")
    find(browser, ".xt-desk-back a").click()


def check(browser) -> str:
    button(browser, "Check").click()
    return answered(browser)


def test_the_list_loads_nothing_heavy(page):
    page.open(PAGE)
    asked = page.requests()
    assert not [one for one in asked for part in HEAVY if part in one]
    assert page.run("return document.querySelectorAll('.xt-drills li a').length") > 20
    assert page.complaints() == []


def test_a_right_file_is_right_solved_and_drawn(page):
    begin(page, "ring_all_reduce")
    paste(page, drill("ring_all_reduce").solution)
    assert check(page).startswith("Right")
    shown = page.run("return document.querySelector('.xt-steps-stage').innerHTML")
    assert "<svg" in shown
    stage = find(page, ".xt-steps-stage")
    stage.send_keys(Keys.ARROW_RIGHT)
    after = page.run("return document.querySelector('.xt-steps-stage').innerHTML")
    assert after != shown
    words = page.run(
        "return document.querySelector('.xt-steps-box output').textContent"
    )
    assert words.startswith("step 2 of ")
    assert json.loads(page.run(STORED, "ring_all_reduce"))["solved"].keys() == {"body"}
    back(page)
    solved = find(page, "#ring_all_reduce .xt-drill-done")
    assert solved.text.startswith("solved (body) in 0:")
    assert find(page, ".xt-drill-sum").text.startswith("1 of ")
    assert page.complaints() == []
    here = (page.root, "data:", "about:", "blob:")
    assert [one for one in page.requests() if not one.startswith(here)] == []


def test_a_wrong_line_is_told_and_marked(page):
    begin(page, "ring_all_reduce")
    source = drill("ring_all_reduce").solution.replace(
        "    rank, size = dist.get_rank(group), dist.get_world_size(group)\n",
        "    rank, size = dist.get_rank(group), unknown\n", 1,
    )  # fmt: skip
    number = source[: source.index("unknown")].count("\n") + 1
    paste(page, source)
    assert f"line {number}" in check(page)
    marked = page.run("return document.querySelector('.cm-line.xt-bad-line').innerText")
    assert "unknown" in marked
    assert page.run(STORED, "ring_all_reduce").count('"solved":{}') == 1


def test_a_loop_without_end_is_stopped_and_python_answers_again(page):
    begin(page, "gpipe")
    paste(page, drill("gpipe").solution)
    assert check(page).startswith("Right")
    paste(page, ENDLESS)
    assert "so the file was stopped" in check(page)
    paste(page, drill("gpipe").solution)
    assert check(page).startswith("Right")


def test_stop_ends_a_run_at_once(page):
    begin(page, "gpipe")
    paste(page, drill("gpipe").solution)
    check(page)
    paste(page, ENDLESS)
    button(page, "Check").click()
    wait_until(lambda: page.run(SAYS) == "Checking …", STARTS)
    button(page, "Stop").click()
    wait_until(lambda: page.run(SAYS) == "Stopped.", 2)


def test_what_is_written_outlives_the_page_and_travels_as_a_file(page):
    begin(page, "gpipe", "blank")
    paste(page, "first = 1")
    wait_until(lambda: "first = 1" in (page.run(STORED, "gpipe") or ""), 5)
    begin(page, "gpipe")
    assert page.run(TEXT) == "first = 1"
    back(page)
    file = page.driver.execute_async_script(EXPORT)
    assert json.loads(file)["drills"]["gpipe"]["texts"] == {"blank": "first = 1"}
    page.run("localStorage.clear()")
    for text, said in (("{}", "was not exported"), (file, "1 drills imported")):
        page.run(IMPORT, text)
        wait_until(lambda said=said: said in find(page, ".xt-status").text)
    begin(page, "gpipe")
    assert page.run(TEXT) == "first = 1"
    button(page, "Start again").click()
    find(page, "dialog button[value=yes]").click()
    wait_until(lambda: "first = 1" not in page.run(TEXT))


EXPORT = """
const done = arguments[0], made = URL.createObjectURL;
URL.createObjectURL = (blob) => (blob.text().then(done), made.call(URL, blob));
document.querySelector(".xt-drill-keep button").click();
"""
IMPORT = """
const input = document.querySelector(".xt-drill-keep input");
const files = new DataTransfer();
files.items.add(new File([arguments[0]], "xtrain-drills.json"));
input.files = files.files;
input.dispatchEvent(new Event("change", { bubbles: true }));
"""


def test_by_keyboard_alone(page):
    page.open(PAGE)
    page.run("document.querySelector('#gpipe a').focus()")
    keys(page, Keys.ENTER)
    wait_until(lambda: page.run("return !!document.querySelector('.cm-content')"))
    focused = (
        "return document.activeElement.className || document.activeElement.tagName"
    )
    for _ in range(8):
        if "cm-content" in page.run(focused):
            break
        keys(page, Keys.TAB)
    assert "cm-content" in page.run(focused)
    role = "const a = document.activeElement; return [a.role, a.ariaLabel]"
    assert page.run(role) == ["textbox", "gpipe.py, the file you write"]
    with_control(page, "a")
    keys(page, "def gpipe(a, b):", Keys.ENTER, "return 1")
    keys(page, Keys.ENTER, Keys.TAB, "x = 2")
    assert page.run(TEXT) == "def gpipe(a, b):\n    return 1\n    x = 2"
    with_control(page, Keys.ENTER)
    assert not answered(page).startswith("Right")
    assert "cm-content" in page.run(focused)
    keys(page, Keys.ESCAPE, Keys.TAB)
    assert page.run("return document.activeElement.textContent") == "Check"


def test_hints_come_one_by_one_and_the_solution_asks_first(page):
    begin(page, "ring_all_reduce")
    for given in (1, 2, 3):
        button(page, "Hint").click()
        assert page.run(
            "return document.querySelectorAll('.xt-help > div').length"
        ) == (given)
    assert not button(page, "Hint").is_enabled()
    button(page, "Solution").click()
    keys(page, Keys.ESCAPE)
    wait_until(lambda: not page.run("return document.querySelector('dialog')"), 5)
    button(page, "Solution").click()
    find(page, "dialog button[value=yes]").click()
    last = "return document.querySelector('.xt-help > :last-child code').textContent"
    wait_until(lambda: page.run(last) == drill("ring_all_reduce").solution)


def test_on_a_phone_it_is_read_and_run(page):
    page.screen(390, 844)
    begin(page, "gpipe", "gap")
    paste(page, drill("gpipe").solution)
    assert check(page).startswith("Right")
    wide = "return document.documentElement.scrollWidth"
    assert page.run(wide) <= 390
    content = "getComputedStyle(document.querySelector('.cm-content'))"
    assert page.run(f"return parseFloat({content}.fontSize)") >= 10
    assert page.complaints() == []


ASK = """
const files = arguments[0];
const home = document.querySelector("link[href$='drill.css']").href;
const worker = new Worker(new URL("drill-worker.mjs", home), { type: "module" });
const found = (window.found = []);
worker.onmessage = ({ data }) => {
  if (data.ready) files.forEach(([name, source], id) =>
    worker.postMessage({ id: id + 1, name, source, ranks: 4 }));
  else found.push(data.error ? { words: data.error } : data.answer);
  if (found.length === files.length) worker.terminate();
};
"""


def verdicts(browser, files):
    """What the page's worker answers to each (drill, source)."""
    browser.open(PAGE)
    browser.run(ASK, files)
    # All take minutes, and selenium waits two for an answer: it is asked each second.
    count = "setTimeout(() => arguments[0](found.length), 1000)"
    ask = browser.driver.execute_async_script
    wait_until(lambda: ask(count) == len(files), 900)
    return zip(files, browser.run("return found"), strict=True)


def test_solutions_and_known_mistakes_are_judged_as_on_the_command_line(browser):
    """The command line's own verdicts on them are held by tests/practice."""
    files, wanted = [], []
    for name in IN_PAGE:
        one = drill(name)
        files.append([name, one.solution])
        wanted.append("")
        for mistake in mistakes_of(one)[:2]:
            files.append([name, mistake.planted(one.solution)])
            wanted.append(mistake.words)
    for (file, found), words in zip(verdicts(browser, files), wanted, strict=True):
        assert found["right"] == (not words), (file[0], found["words"])
        assert found["mistake"] == words, (file[0], found["words"])


def test_files_of_readers_are_judged_as_on_the_command_line(browser):
    """Endless loops among them, which Python itself stops here."""
    here = [file for file in FILES if file.stem.partition("__")[0] in IN_PAGE]
    files = [[file.stem.partition("__")[0], file.read_text()] for file in here]
    for file, (_, found) in zip(here, verdicts(browser, files), strict=True):
        right = file.stem.partition("__")[2].startswith("right")
        assert found["right"] == right, (file.stem, found["words"])
        if not right:
            said = IN_THE_PAGE.get(file.stem, SAID[file.stem])
            assert said in found["words"], (file.stem, found["words"])
