"""Whether a page's texts can be read where they stand: none on another, none cut."""

from pathlib import Path

from .conftest import Browser

SCRIPT = Path(__file__).with_suffix(".js").read_text()
SCREENS = ((1280, False), (1920, True), (390, False))
"""Width in pixels, and whether in dark colours."""

STILL = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100)));
"""


def problems(browser: Browser, page: str, *, load: bool = True) -> list[str]:
    """What is wrong on a page at three widths, with every fold closed and open."""
    found = []
    if load:
        browser.screen(1280, 900)
        browser.open(page)
    for width, dark in SCREENS:
        browser.screen(width, 844 if width < 500 else 900, dark)
        browser.driver.execute_async_script(STILL)
        for line in browser.run(SCRIPT, False):
            found.append(f"{page} at {width}: {line}")
    for width, dark in SCREENS[::-1]:
        browser.screen(width, 844 if width < 500 else 900, dark)
        browser.driver.execute_async_script(STILL)
        for line in browser.run(SCRIPT, True):
            found.append(f"{page} at {width}: {line}")
    return list(dict.fromkeys(found))
