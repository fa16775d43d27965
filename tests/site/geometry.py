"""Whether a page's texts can be read where they stand: none on another, none cut."""

from pathlib import Path

from .conftest import Browser

SCRIPT = Path(__file__).with_suffix(".js").read_text()
SCREENS = ((390, 844, False), (1280, 900, False), (1920, 1080, True))
"""Width and height in pixels, and whether in dark colours."""

STILL = """
const done = arguments[0];
requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 100)));
"""


def problems(browser: Browser) -> list[str]:
    """What is wrong on the open page: as it stands, then unfolded at three widths."""
    found = [f"as opened: {line}" for line in browser.run(SCRIPT, False)]
    for width, height, dark in SCREENS:
        browser.screen(width, height, dark)
        browser.driver.execute_async_script(STILL)
        found += [f"{width} wide: {line}" for line in browser.run(SCRIPT, True)]
    return found
