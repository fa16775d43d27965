"""One headless Chromium and one server for all tests of the built site."""

import importlib.util
import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.testing.processes import wait_until
from xtrain_docs import config, serve

SITE = Path(os.environ.get("XTRAIN_SITE_DIR") or config.SITE)
"""What is tested: the published site, or the folder that XTRAIN_SITE_DIR names."""


def pages() -> list[str]:
    """Every page."""
    return sorted(
        path.relative_to(SITE).parent.as_posix() + "/"
        for path in (SITE / "en").rglob("index.html")
    )


def missing() -> str:
    """Why these tests cannot run here; empty if they can."""
    if not (SITE / "en/index.html").is_file():
        return f"no built site in {SITE}: run `make build` first"
    if not importlib.util.find_spec("selenium"):
        return "selenium is not installed"
    for program in ("chromium", "chromedriver"):
        if not shutil.which(program):
            return f"{program} is not installed"
    return ""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a browser, with the reason."""
    why = missing()
    here = Path(__file__).parent
    for item in items:
        if why and here in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=why))


class Browser:
    """A Chromium that remembers what it loaded and complained about.

    It reaches 127.0.0.1 alone: every name of a host is unknown, in workers as well.
    """

    def __init__(self, root: str) -> None:
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = str(shutil.which("chromium"))
        for flag in ("--headless=new", "--no-sandbox", "--disable-gpu",
                     "--disable-dev-shm-usage", "--hide-scrollbars",
                     "--no-first-run", "--disable-background-networking",
                     "--disable-component-update", "--disable-sync",
                     "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
                     ):  # fmt: skip
            options.add_argument(flag)
        options.set_capability(
            "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
        )
        self.root = root
        service = Service(str(shutil.which("chromedriver")))
        self.driver = webdriver.Chrome(options=options, service=service)
        self.driver.set_script_timeout(20)
        self.driver.set_page_load_timeout(30)
        self.screen(1280, 900)

    def screen(self, width: int, height: int, dark: bool = False) -> None:
        """Set the size of the screen and the preferred colours."""
        self.driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": width, "height": height, "deviceScaleFactor": 1,
             "mobile": width < 500},
        )  # fmt: skip
        scheme = "dark" if dark else "light"
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia",
            {"features": [{"name": "prefers-color-scheme", "value": scheme}]},
        )

    def open(self, page: str) -> None:
        """Load a page afresh, forgetting earlier complaints."""
        self.complaints()
        self.requests()
        self.driver.get("about:blank")
        self.driver.get(f"{self.root}/{page}")
        state = "return document.readyState"  # the driver may come back before it
        wait_until(lambda: self.run(state) == "complete", 30, f"the load of {page}")

    def run(self, script: str, *arguments: object) -> object:
        """The value of a script in the page."""
        return self.driver.execute_script(script, *arguments)

    def complaints(self) -> list[str]:
        """Errors and warnings on the console since the last call."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in ("SEVERE", "WARNING")
        ]

    def requests(self) -> list[str]:
        """Addresses asked for since the last call."""
        found = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                found.append(message["params"]["request"]["url"])
        return found


@pytest.fixture(scope="session")
def root() -> Iterator[str]:
    """The address of the served site."""
    made = serve.server(SITE)
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{made.server_port}"
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture(scope="session")
def session(root: str) -> Iterator[Browser]:
    """The one browser."""
    made = Browser(root)
    yield made
    made.driver.quit()


@pytest.fixture
def browser(session: Browser) -> Browser:
    """The browser with a desktop screen and light colours."""
    session.screen(1280, 900)
    return session
