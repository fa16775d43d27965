"""The built site in a headless Chromium."""

import importlib.util
import os
import time
from pathlib import Path

import pytest

from tests.site import geometry
from tests.site.conftest import SITE, pages
from tests.testing.processes import wait_until


PAGES = pages() if SITE.is_dir() else []
RING = "en/lc1-communication/ring-all-reduce/"
HOME = "en/"

WIDE = """
const wide = document.documentElement.clientWidth;
const over = document.documentElement.scrollWidth - wide;
if (over <= 0) return [];
return [...document.querySelectorAll('main *')]
  .filter(e => e.getBoundingClientRect().right > wide + 1 && !e.closest(
    'pre, .xt-scroll, .md-typeset__scrollwrap, .xt-trace-table, .xt-math'))
  .slice(0, 3).map(e => e.outerHTML.slice(0, 120)).concat([`${over} px too wide`]);
"""
HIDDEN = """
return [...document.querySelectorAll('pre > code')]
  .filter(c => !c.closest('details:not([open])') && !c.closest('.tabbed-block')
    && (c.getBoundingClientRect().height < 10
      || getComputedStyle(c).visibility !== 'visible'))
  .map(c => c.textContent.slice(0, 60));
"""


@pytest.mark.parametrize("page", PAGES)
def test_page(browser, page):
    """Loads, without complaint, from here alone; its code and texts can be read."""
    browser.screen(390, 844)
    browser.open(page)
    assert browser.run("return document.querySelectorAll('h1').length") == 1
    assert browser.run(WIDE) == []
    assert browser.run(HIDDEN) == []
    assert browser.complaints() == []
    requests = browser.requests()
    assert requests
    here = (browser.root, "data:", "about:", "blob:")
    assert [address for address in requests if not address.startswith(here)] == []
    assert geometry.problems(browser) == []


WRONG = """
const style = document.createElement("style");
style.textContent = arguments[0];
document.head.append(style);
"""


@pytest.mark.parametrize(
    ("style", "told"),
    [
        ("article h2 + p { margin-top: -3em }", "overlap"),
        ("article p { max-height: 1em; overflow: hidden }", "cut"),
        ("article p { position: relative; left: 9em }", "off the screen"),
        ("main svg text { font-size: 8px !important }", "small"),
    ],
)
def test_the_geometry_finds_what_is_wrong(browser, style, told):
    browser.screen(390, 844)
    browser.open("en/planning/memory-math/")
    assert geometry.problems(browser) == []
    browser.run(WRONG, style)
    assert any(f": {told}" in line for line in geometry.problems(browser))


def test_the_root_leads_to_the_pages(browser):
    browser.open("")
    wait_until(lambda: browser.driver.current_url.endswith("/en/"), what="redirect")


def test_a_lost_reader_is_led_back(browser):
    browser.open("en/no-such-page/")
    assert "No rank answers" in browser.run("return document.body.innerText")
    browser.run("document.querySelector('.md-button--primary').click()")
    wait_until(lambda: browser.driver.current_url.endswith("/en/"), what="home")


def clipboard(browser) -> str:
    """What is on the clipboard."""
    return browser.driver.execute_async_script(
        "const done = arguments[0];"
        "navigator.clipboard.readText().then(done, e => done('no: ' + e))"
    )


@pytest.fixture
def copying(browser):
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions",
        {"origin": browser.root,
         "permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]},
    )  # fmt: skip
    browser.open(HOME)
    return browser


def test_the_copy_button_copies_the_code_as_it_is(copying):
    block = copying.driver.find_element("css selector", ".xt-bar + .highlight")
    copying.run("arguments[0].scrollIntoView({block: 'center'})", block)
    button = wait_until(
        lambda: block.find_elements("css selector", "button[data-clipboard-target]"),
        what="copy button",
    )[0]
    copying.run("arguments[0].scrollIntoView({block: 'center'})", button)
    button.click()
    text = wait_until(lambda: clipboard(copying), what="copy")
    assert "def ring_all_reduce(" in text
    compile(text, "copied", "exec")


def test_copying_a_command_leaves_the_prompt_behind(copying):
    block = copying.driver.find_element("css selector", "#commands ~ .language-console")
    copying.run("arguments[0].scrollIntoView({block: 'center'})", block)
    wait_until(
        lambda: block.find_elements("css selector", "button[data-clipboard-target]"),
        what="copy button",
    )[0].click()
    text = wait_until(
        lambda: "make" in (found := clipboard(copying)) and found, what="commands"
    )
    assert text.split("\n") == ["make site", "make test"]


def test_a_folded_block_opens_in_place_and_is_copied_whole(copying):
    copying.open("en/lc6-context-parallel/ring-attention/")
    find = copying.driver.find_element
    fold = find("css selector", ".highlight > .xt-fold")
    block = fold.find_element("xpath", "..")
    code = block.find_element("css selector", "pre > code")
    label = block.find_element("css selector", "label")
    copying.run("arguments[0].scrollIntoView({block: 'center'})", block)
    count = int(label.text.split()[1])
    folded = code.text.split("\n")
    assert label.text == f"All {count} lines" and 10 <= len(folded) < 20 < count
    wait_until(
        lambda: block.find_elements("css selector", "button[data-clipboard-target]"),
        what="copy button",
    )[0].click()
    text = wait_until(lambda: clipboard(copying), what="copy")
    compile(text, "copied", "exec")
    assert len(text.split("\n")) == count
    copying.run("arguments[0].focus()", fold)
    press(copying, " ")
    assert label.text == "Fewer lines"
    opened = code.text.split("\n")
    assert len(opened) > count - 3 and not any("\u22ef" in line for line in opened)


TIMELINE = "en/lc5-pipeline-parallel/interleaved/"
LABELS = "return document.querySelectorAll('svg.xs text.n').length"
BAR = "document.querySelector('.xt-schedule-bar')"


def test_a_timeline_is_read_by_keyboard_pointer_and_zoom(browser):
    from selenium.webdriver import ActionChains

    browser.screen(390, 844)
    browser.open(TIMELINE)
    frame = browser.driver.find_element("css selector", ".xt-schedules")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", frame)
    wait_until(lambda: browser.run(f"return !!{BAR}"), what="the bar of the timeline")
    said = f"return {BAR}.querySelector('output').textContent"
    browser.run("arguments[0].focus()", frame)
    press(browser, "\ue014")  # right
    assert browser.run(said) == "rank 0, 0 to 1: forward of micro-batch 0 on stage 0"
    press(browser, "\ue014")
    press(browser, "\ue015")  # down
    assert browser.run(said).startswith("rank 1, 1 to 2: forward of micro-batch 0")
    legend = browser.run(f"return {BAR}.querySelector('ul').innerText")
    assert legend.split("\n")[:2] == ["forward", "backward (both)"]

    wide = "return document.querySelector('svg.xs').getBoundingClientRect().width"
    before, labels = browser.run(wide), browser.run(LABELS)
    press(browser, "+")
    assert browser.run(wide) > 1.3 * before
    browser.run(f"{BAR}.querySelector('button:last-child').click()")  # fit
    assert browser.run(wide) <= browser.run("return arguments[0].clientWidth", frame)
    assert browser.run(LABELS) < labels, "a cell that is too narrow has no number"
    press(browser, "0")
    assert browser.run(wide) == before and browser.run(LABELS) == labels

    cell = browser.driver.find_elements("css selector", "svg.xs rect[style]")[1]
    ActionChains(browser.driver).move_to_element(cell).perform()
    assert "forward of micro-batch 1 on stage 0" in browser.run(said)


def test_a_timeline_is_dragged_by_a_mouse_and_zoomed_by_its_wheel(browser):
    from selenium.webdriver import ActionChains

    browser.screen(1280, 900)
    browser.open("en/lc5-pipeline-parallel/dualpipe/")
    frame = browser.driver.find_element("css selector", ".xt-schedules")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", frame)
    wait_until(lambda: browser.run(f"return !!{BAR}"), what="the bar of the timeline")
    left = "return arguments[0].scrollLeft"
    for _ in range(3):
        browser.run(f"{BAR}.querySelectorAll('button')[1].click()")  # zoom in
    before = browser.run(left, frame)
    assert before > 0, "the middle stays in the middle"
    names = (
        "return document.querySelector('svg.xs .names').getBoundingClientRect().left"
    )
    kept = browser.run(names)
    mouse = ActionChains(browser.driver).move_to_element(frame).click_and_hold()
    mouse.move_by_offset(-60, 0).move_by_offset(-60, 0).release().perform()
    assert browser.run(left, frame) == before + 120
    assert abs(browser.run(names) - kept) < 1

    wide = "return document.querySelector('svg.xs').getBoundingClientRect().width"
    before = browser.run(wide)
    box = frame.rect
    top = box["y"] - browser.run("return scrollY") + box["height"] / 2
    browser.driver.execute_cdp_cmd("Input.dispatchMouseEvent", {
        "type": "mouseWheel", "x": box["x"] + 300, "y": top, "deltaX": 0,
        "deltaY": -120, "modifiers": 2})  # fmt: skip
    wait_until(lambda: browser.run(wide) > 1.15 * before, what="the zoom")


def test_a_timeline_that_is_wider_than_a_phone_scrolls(browser):
    browser.screen(390, 844)
    browser.open(TIMELINE)
    frame = browser.driver.find_element("css selector", ".xt-schedules")
    browser.run("arguments[0].scrollIntoView({block: 'center'})", frame)
    wait_until(lambda: browser.run(f"return !!{BAR}"), what="the bar of the timeline")
    script = "arguments[0].scrollLeft = 1e4; return arguments[0].scrollLeft"
    last = browser.run(script, frame)
    wide = "return document.querySelector('svg.xs').getBoundingClientRect().width"
    assert last > browser.run(wide) - browser.run(
        "return arguments[0].clientWidth", frame
    )


def test_a_wide_timeline_leaves_the_column_and_hides_what_it_would_cover(browser):
    browser.open("en/lc5-pipeline-parallel/dualpipe/")
    frame = "document.querySelector('.xt-schedules')"
    column = "document.querySelector('article > p').getBoundingClientRect()"
    contents = "getComputedStyle(document.querySelector('.md-sidebar--secondary'))"
    browser.run(f"{frame}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
    shown = f"return {contents}.visibility"
    wait_until(lambda: browser.run(shown) == "hidden", what="the contents to go")
    right = f"{frame}.getBoundingClientRect().right"
    assert browser.run(f"return {right} > {column}.right + 50 && {right} <= innerWidth")
    browser.run("scrollTo({top: 5000, behavior: 'instant'})")
    wait_until(lambda: browser.run(shown) == "visible", what="the contents again")


def test_a_button_chooses_the_colours_and_the_choice_stays(browser):
    browser.open(HOME)
    scheme = "return document.body.dataset.mdColorScheme"
    button = browser.driver.find_element("css selector", ".xt-colours")
    found = [(browser.run(scheme), button.get_attribute("aria-label"))]
    for _ in range(2):
        button.click()
        found.append((browser.run(scheme), button.get_attribute("aria-label")))
    assert [one for one, _ in found] == ["default", "default", "slate"]
    assert len({name for _, name in found}) == 3
    browser.open(RING)
    assert browser.run(scheme) == "slate"
    browser.driver.find_element("css selector", ".xt-colours").click()
    assert browser.run(scheme) == "default"
    browser.run("localStorage.clear()")


STEP = "return document.querySelector('xt-trace output').textContent"


def press(browser, key: str) -> None:
    from selenium.webdriver import ActionChains

    ActionChains(browser.driver).send_keys(key).perform()


def test_the_animation_is_worked_by_keyboard(browser):
    from selenium.webdriver.common.keys import Keys

    browser.open(RING)
    wait_until(
        lambda: browser.run("return document.querySelector('xt-trace .xt-node')")
    )
    browser.run("document.querySelector('.xt-stage-frame').focus()")
    assert browser.run(STEP) == "step 0 of 6"
    press(browser, Keys.ARROW_RIGHT)
    wait_until(lambda: browser.run(STEP) == "step 1 of 6", what="one step")
    says = "return document.querySelector('.xt-says').textContent"
    wait_until(lambda: "sends cell" in browser.run(says), what="its words")
    assert "adds" in browser.run(says)
    press(browser, Keys.END)
    wait_until(lambda: browser.run(STEP) == "step 6 of 6", what="end")
    done = "return document.querySelectorAll('xt-trace .xt-node-done').length"
    assert browser.run(done) == 4
    press(browser, Keys.ARROW_LEFT)
    wait_until(lambda: browser.run(STEP) == "step 5 of 6", what="back")
    press(browser, Keys.HOME)
    wait_until(lambda: browser.run(STEP) == "step 0 of 6", what="start")
    press(browser, " ")
    wait_until(lambda: browser.run(STEP) == "step 2 of 6", 6, what="playing")
    press(browser, " ")
    label = "return document.querySelector('.xt-play').getAttribute('aria-label')"
    wait_until(lambda: browser.run(label) == "Play", what="pause")


def test_the_animation_keeps_still_for_readers_who_ask(browser):
    browser.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia",
        {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]},
    )
    browser.open(HOME)
    plays = "return document.querySelector('xt-trace[data-autoplay]').looping"
    assert not browser.run(plays)
    assert browser.run(STEP) == "step 0 of 6"


def test_without_scripts_the_messages_are_a_table(browser):
    browser.driver.execute_cdp_cmd(
        "Emulation.setScriptExecutionDisabled", {"value": True}
    )
    try:
        browser.open(RING)
        rows = browser.driver.find_elements("css selector", ".xt-trace-table tbody tr")
        assert len(rows) == 24
        assert rows[0].is_displayed()
    finally:
        browser.driver.execute_cdp_cmd(
            "Emulation.setScriptExecutionDisabled", {"value": False}
        )


def index_requests(browser) -> list[str]:
    """Requests for the search index since the last question."""
    return [a for a in browser.requests() if "search_index" in a]


@pytest.mark.parametrize("page", [HOME, RING])
def test_the_search_index_waits_until_somebody_searches(browser, page):
    browser.open(page)
    time.sleep(0.5)  # it must not come meanwhile: no event tells that
    assert index_requests(browser) == []
    press(browser, "/")
    wait_until(
        lambda: index_requests(browser), what="the index, once search has the focus"
    )


def test_words_that_were_searched_are_marked_on_the_page(browser):
    browser.open(f"{RING}?h=ring")
    wait_until(
        lambda: browser.run("return document.querySelector('mark[data-md-highlight]')"),
        30,
        "a marked word, for which the index is needed",
    )


def search(browser, opener: str, words: str) -> None:
    """Open the search with a control of the page, and type."""
    browser.driver.find_element("css selector", opener).click()
    field = browser.driver.find_element("css selector", ".md-search__input")
    wait_until(field.is_displayed, what="search field")
    field.send_keys(words)


def test_search_finds_a_function(browser):
    browser.open(HOME)
    assert index_requests(browser) == []
    search(browser, ".md-search__input", "ring_all_reduce")
    links = wait_until(
        lambda: browser.run(
            "return [...document.querySelectorAll('.md-search-result__link')]"
            ".map(a => a.getAttribute('href'))"
        ),
        30,
        "search results",
    )
    assert any("ring" in link for link in links)


def test_dark_colours_follow_the_system(browser):
    browser.screen(1280, 900, dark=True)
    browser.open(HOME)
    assert browser.run("return document.body.dataset.mdColorScheme") == "slate"
    assert browser.run(
        "return getComputedStyle(document.body).backgroundColor"
    ) == "rgb(16, 21, 28)"  # fmt: skip


TABS = "return [...document.querySelectorAll('.md-tabs__link')].map(a => a.innerText)"
FOLDED = """
return [...document.querySelectorAll('.md-nav--primary .md-nav__link[href]')]
  .filter(a => a.offsetParent).map(a => a.getAttribute('href'))
"""


def test_tabs_stay_few_and_only_the_open_lecture_is_unfolded(browser):
    browser.open(RING)
    assert 2 <= len(browser.run(TABS)) <= 7
    shown = browser.run(FOLDED)
    assert "../one-shot/" in shown
    assert "../../lc3-zero/" in shown, "the index of another lecture"
    assert not [link for link in shown if "lc3-zero/" in link and link[-5:] != "zero/"]
    assert len(shown) < 60


def test_every_lecture_can_be_reached_on_a_phone(browser):
    browser.screen(390, 844)
    browser.open(RING)
    browser.run(
        "document.querySelector('label.md-header__button[for=__drawer]').click()"
    )
    links = browser.run(
        "return [...document.querySelectorAll('.md-nav--primary a')].map(a => a.href)"
    )
    for lecture in ("lc1-communication", "lc2-data-parallel", "lc3-zero"):
        assert f"{browser.root}/en/{lecture}/" in links


def test_a_link_to_a_test_opens_its_code_on_the_page(browser):
    browser.open("en/interview/lc1/")
    link = "document.querySelector('article a[href^=\"#code-tests\"]')"
    shown = f"document.getElementById({link}.hash.slice(1))"
    assert not browser.run(f"return {shown}.open")
    browser.run(f"{link}.click()")
    wait_until(lambda: browser.run(f"return {shown}.open"), what="the code of the test")
    text = f"return {shown}.querySelector('code').innerText"
    wait_until(lambda: "def test_" in browser.run(text), what="its code to be shown")


def axe_script() -> str | None:
    """axe, from the path XTRAIN_AXE names or the installed package."""
    if path := os.environ.get("XTRAIN_AXE"):
        return Path(path).read_text()
    spec = importlib.util.find_spec("axe_core_python")
    if not spec or not spec.origin:
        return None
    return (Path(spec.origin).parent / "axe.min.js").read_text()


AXE_PAGES = [HOME, RING, "en/verification/", "en/reference/comm/",
             "en/interview/lc1/"]  # fmt: skip


# Scripts name what the theme adds 100 ms after it was added.
SETTLED = """
const done = arguments[0];
let timer = setTimeout(done, 300);
new MutationObserver((changes) => {
  if (changes.every(({target}) => target.closest("xt-trace"))) return;
  clearTimeout(timer);
  timer = setTimeout(done, 300);
}).observe(document.body, {childList: true, subtree: true});
"""


@pytest.mark.parametrize(
    ("width", "dark"), [(1280, False), (390, True)], ids=["light", "dark-phone"]
)
def test_accessibility(browser, width, dark):
    """axe finds nothing to complain about."""
    script = axe_script()
    if script is None:
        pytest.skip("axe-core-python is not installed")
    problems = []
    for page in AXE_PAGES:
        if not (SITE / page / "index.html").is_file():
            continue
        browser.screen(width, 900, dark)
        browser.open(page)
        browser.driver.execute_async_script(SETTLED)
        browser.run(script)
        found = browser.driver.execute_async_script(
            "const done = arguments[0]; axe.run({resultTypes: ['violations']})"
            ".then(r => done(r.violations.map(v => [v.id, v.impact, v.nodes.length,"
            " v.nodes[0].html.slice(0, 160), v.nodes[0].failureSummary])))"
        )
        problems += [(page, *violation) for violation in found]
    assert problems == []


def test_search_shows_its_results_on_a_phone(browser):
    browser.screen(390, 844)
    browser.open(HOME)
    search(browser, "label.md-header__button[for=__search]", "all reduce")
    wait_until(
        lambda: browser.run(
            "const first = document.querySelector('.md-search-result__link');"
            "if (!first) return false;"
            "const {x, y} = first.getBoundingClientRect();"
            "return first.contains(document.elementFromPoint(x + 40, y + 40))"
        ),
        30,
        "a result in sight",
    )


@pytest.mark.parametrize("width", [390, 1280])
def test_code_takes_the_height_that_was_kept_for_it(browser, width):
    """Blocks off the screen are laid out late; nothing may move when they are."""
    browser.screen(width, 800)
    browser.open("en/lc3-zero/stage-3/")
    late, kept, shown = browser.run(
        """const blocks = [...document.querySelectorAll('.highlight > pre')];
        const heights = () => blocks.map((b) => Math.round(b.offsetHeight));
        const before = heights();
        const late = getComputedStyle(blocks.at(-1)).contentVisibility === 'auto';
        for (const b of blocks) b.style.contentVisibility = 'visible';
        return [late, before, heights()];"""
    )
    assert late and len(kept) > 5
    assert kept == pytest.approx(shown, abs=2)


def test_what_scrolls_sideways_is_reached_by_keyboard_once_it_is_near(browser):
    browser.screen(390, 800)
    browser.open("en/lc3-zero/stage-3/")
    shown = "code => !code.closest('details:not([open])')"
    codes = "[...document.querySelectorAll('.highlight > pre > code')]"
    last = f"{codes}.filter({shown}).at(-1)"
    browser.run(f"{last}.scrollIntoView()")
    assert browser.run(f"return {last}.scrollWidth > {last}.clientWidth + 1")
    reached = f"{last}.tabIndex >= 0 && !{last}.hasAttribute('data-xt-unmeasured')"
    wait_until(
        lambda: browser.run(f"return {reached}"),
        what="the last block of code to be measured and reached",
    )


NUMBERS = "en/planning/memory-math/"
TIPS = """
return [...document.querySelectorAll('.md-tooltip2--active > *')].map((tip) => {
  const { left, right } = tip.getBoundingClientRect();
  return [tip.textContent, left >= 0 && right <= innerWidth];
});
"""
MIDDLE = """
const numbers = [...document.querySelectorAll('.xt-value[tabindex]')];
const number = numbers.find((n) => n.closest(arguments[0]));
number.scrollIntoView({ block: 'center', behavior: 'instant' });
const { x, y, width, height } = number.getBoundingClientRect();
return [number.title, x + width / 2, y + height / 2];
"""


AROUND = """
const block = document.querySelector('p .xt-value[tabindex]').closest('p');
const [own, next] = [block, block.nextElementSibling].map((e) =>
  e.getBoundingClientRect());
return [own.width, own.height, next.top - own.top].map(Math.round);
"""


def test_a_number_tells_the_keyboard_how_it_was_computed(browser):
    from selenium.webdriver.common.keys import Keys

    browser.open(NUMBERS)
    title, *_ = browser.run(MIDDLE, "p")
    before = browser.run(AROUND)
    browser.run("document.querySelector('p .xt-value[tabindex]').focus()")
    wait_until(lambda: browser.run(TIPS) == [[title, True]], what="the tip")
    assert title.startswith("computed: ")
    assert browser.run(AROUND) == before  # nothing moves
    press(browser, Keys.ESCAPE)
    wait_until(lambda: browser.run(TIPS) == [], what="no tip")


def tap(browser, x: float, y: float) -> None:
    """A finger on the screen, and off again."""
    for kind, points in (("touchStart", [{"x": x, "y": y}]), ("touchEnd", [])):
        browser.driver.execute_cdp_cmd(
            "Input.dispatchTouchEvent", {"type": kind, "touchPoints": points}
        )


@pytest.mark.parametrize(
    ("page", "where"), [(NUMBERS, "p"), ("en/lc1-communication/ring-or-tree/", "td")]
)
def test_a_tap_on_a_number_tells_how_it_was_computed(browser, page, where):
    browser.screen(390, 844)
    browser.open(page)
    title, x, y = browser.run(MIDDLE, where)
    tap(browser, x, y)
    wait_until(lambda: browser.run(TIPS) == [[title, True]], what="the tip, in sight")
    assert browser.run(WIDE) == []
    tap(browser, 4, 200)
    wait_until(lambda: browser.run(TIPS) == [], what="no tip")


LEDGER = """
const field = document.querySelector(".xt-filter");
field.value = arguments[0];
field.dispatchEvent(new Event("input"));
const shown = [...document.querySelectorAll("tbody tr")].filter((row) => !row.hidden);
return shown.map((row) => row.textContent);
"""


def test_the_filter_of_the_ledger_leaves_rows_with_all_words(browser):
    browser.open("en/verification/ledger/comm/")
    rows = browser.run(LEDGER, "")
    found = browser.run(LEDGER, "Ring_all_reduce test_")
    assert 0 < len(found) < len(rows) / 2
    assert any("ring_all_reduce" in row for row in found)
    assert browser.run(LEDGER, "no such name") == []
    assert browser.run(LEDGER, "") == rows
