"""What the built site weighs for a reader, in numbers: `make measure-site`.

Screens and words of pages, texts that overlap, are cut or too small, size and answers
of the search, seconds of the calculators and, where `npx lighthouse` is there,
Lighthouse on a phone. XTRAIN_SITE_DIR names another site to compare with.
"""

import argparse
import gzip
import json
import shutil
import statistics
import subprocess
import tempfile
import threading
from collections import Counter
from pathlib import Path

from xtrain_docs import serve

from . import geometry
from .conftest import SITE, Browser, pages
from .test_search import INDEX, QUESTIONS, asked

CORE = ("lc1-communication", "lc2-data-parallel", "lc3-zero", "lc4-tensor-parallel",
        "lc5-pipeline-parallel", "lc6-context-parallel", "lc7-expert-parallel",
        "planning", "cluster")  # fmt: skip
"""Folders of the pages that are read from top to bottom."""

PARTS = ("pages", "search", "calculators", "lighthouse")
LIGHTHOUSE = (
    "en/", "en/lc1-communication/ring-all-reduce/", "en/lc2-data-parallel/",
    "en/lc3-zero/stage-3/", "en/lc4-tensor-parallel/", "en/lc5-pipeline-parallel/",
    "en/lc6-context-parallel/ring-attention/", "en/planning/memory-calculator/",
    "en/whiteboard/", "en/interview/lc1/", "en/interview/questions/", "en/practise/",
)  # fmt: skip
"""Twelve named pages."""

TEXT = "return document.querySelector('main .md-content').innerText"
HEIGHT = "return document.documentElement.scrollHeight / innerHeight"


ANSWER = """
const done = arguments[0], form = document.querySelector("xtrain-calculator form");
const status = document.querySelector("xtrain-calculator .xt-status");
const began = performance.now();
form.requestSubmit();
const told = setInterval(() => {
  if (!status.textContent.startsWith("Computed")) return;
  clearInterval(told);
  done((performance.now() - began) / 1000);
}, 5);
"""
"""Asks a calculator for the answer of its form."""


def lighthouse(address: str) -> dict[str, float]:
    """Scores on a phone, and milliseconds of blocked main thread."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        flags = "--headless=new --no-sandbox --disable-gpu"
        subprocess.run(
            ["npx", "lighthouse", address, "--quiet", "--output=json",
             f"--output-path={out}", f"--chrome-flags={flags}"],
            check=True, capture_output=True,
        )  # fmt: skip
        report = json.loads(out.read_text())
    scores = {name: 100 * c["score"] for name, c in report["categories"].items()}
    scores["blocked_ms"] = report["audits"]["total-blocking-time"]["numericValue"]
    return scores


def quantiles(values: list[float]) -> str:
    """Median, nine of ten, most."""
    ninth = statistics.quantiles(values, n=10, method="inclusive")[8]
    return f"{statistics.median(values):.1f} {ninth:.1f} {max(values):.1f}"


def of_pages(browser: Browser, each: bool) -> None:
    """Screens and words of a desktop, and problems of geometry at three widths."""
    screens, words = {}, {}
    problems: Counter[str] = Counter()
    for page in pages():
        browser.screen(1280, 900)
        browser.open(page)
        screens[page] = browser.run(HEIGHT)
        words[page] = len(browser.run(TEXT).split())
        found = geometry.problems(browser)
        problems.update(line.split(": ")[1] for line in found)
        if each:
            print(f"{screens[page]:6.1f} {words[page]:7,} {len(found):4} {page}")
    core = [page for page in screens if page.split("/")[1] in CORE]
    print(f"pages {len(screens)}, of them core {len(core)}")
    print("screens of a core page (median, nine of ten, most)",
          quantiles([screens[page] for page in core]))  # fmt: skip
    print("screens of all", quantiles(list(screens.values())))
    print(f"words of the core pages {sum(words[page] for page in core):,},"
          f" of all {sum(words.values()):,}")  # fmt: skip
    print("texts at 390, 1280 and 1920 pixels:", dict(problems) or "none wrong")


def of_search(browser: Browser) -> None:
    """Size of the index; questions whose page comes first, and among three."""
    found = asked(browser, list(QUESTIONS))
    best = [
        min((answer.index(page) for page in right if page in answer), default=99)
        for right, answer in zip(QUESTIONS.values(), found, strict=True)
    ]
    print(f"search: {len(gzip.compress(INDEX.read_bytes())):,} bytes gzipped,"
          f" {sum(b == 0 for b in best)} of {len(best)} first,"
          f" {sum(b < 3 for b in best)} among three")  # fmt: skip


def of_calculators(browser: Browser) -> None:
    """Seconds from a click to the answer: with Python to load, and again."""
    for name in ("memory-calculator", "layout-planner", "pipeline-explorer"):
        browser.open(f"en/planning/{name}/")
        cold, *warm = (browser.driver.execute_async_script(ANSWER) for _ in range(6))
        print(
            f"{name}: first answer {cold:.1f} s, then {statistics.median(warm):.2f} s"
        )


def main() -> None:
    """Measure the site and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", action="store_true", help="a line a page")
    parser.add_argument("--only", choices=PARTS)
    options = parser.parse_args()
    server = serve.server(SITE)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    root = f"http://127.0.0.1:{server.server_port}"
    if options.only != "lighthouse":
        browser = Browser(root)
        try:
            if options.only in (None, "pages"):
                of_pages(browser, options.each)
            if options.only in (None, "search"):
                of_search(browser)
            if options.only in (None, "calculators"):
                of_calculators(browser)
        finally:
            browser.driver.quit()
    if options.only in (None, "lighthouse"):
        if shutil.which("npx") is None:
            print("Lighthouse was left out: there is no npx")
        else:
            for page in LIGHTHOUSE:
                print(
                    page,
                    *(f"{k} {v:.0f}" for k, v in lighthouse(f"{root}/{page}").items()),
                )
    server.shutdown()


if __name__ == "__main__":
    main()
