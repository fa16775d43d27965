"""Find what must not be on a page: typed code, typed numbers, dead links.

Each function takes text or a folder and returns the problems as sentences; an empty
list means that all is well. The tests in tests/docs run them over every page, and over
pages with planted defects to see that each is caught.
"""

import re
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from . import excerpts, fences
from .generated import kept_by_file

PYTHON = ("py", "python", "python3", "py3", "pycon", "pytb")
UNITS = (
    r"(?:[KMGTP]i?B(?:/s)?|[kKMGT]?bytes|bytes/s|B/s|[GMT]?FLOPS?|"
    r"ms|us|ns|µs|microseconds|milliseconds|seconds|s|%|percent|per cent)"
)
NUMBER = re.compile(
    rf"(?<![\w.$\\-])(?P<n>\d[\d  ,.]*\d|\d)[  ]?(?P<unit>{UNITS})(?![\w/])"
)
TIMES = re.compile(r"(?<![\w.$\\-])\d+(?:\.\d+)?(?:x|×)(?!\w)")
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
MARKED = re.compile(r"\[[^\[\]]*\]\{\s*\.(?:cited|given)\s*\}")
MATH = re.compile(r"\$\$.*?\$\$|(?<![\\$])\$(?!\s)[^$\n]+?(?<!\s)\$", re.DOTALL)
EXPRESSION = re.compile(r"\{\{.*?\}\}")
ADDRESS = re.compile(r"\]\([^)]*\)|\]\[[^\]]*\]|<https?:[^>]*>|\{[^{}]*\}")
ELEMENT_SIZES = {"1 byte", "1 bytes", "2 bytes", "4 bytes", "8 bytes"}
QUESTION = re.compile(r"^\s*\?\?\?\+?\s+question\s+\"")


def typed_code(text: str) -> list[str]:
    """Python fences that embed nothing."""
    problems = []
    for fence in fences.fences(text.splitlines()):
        if fence.language in PYTHON and excerpts.parse(fence.body) is None:
            first = next((line for line in fence.body if line.strip()), "")
            problems.append(f"line {fence.start + 1}: typed Python: {first.strip()}")
    return problems


def prose(text: str) -> list[tuple[int, str]]:
    """Lines of a page with everything blanked that is not the author's words."""
    lines = text.splitlines()
    if lines and lines[0] == "---":
        end = lines.index("---", 1) + 1
        lines = [""] * end + lines[end:]
    for fence in fences.fences(lines):
        for i in range(fence.start, fence.end + 1):
            if fence.language != "rows" or not lines[i].lstrip().startswith("|"):
                lines[i] = ""
    joined = "\n".join(lines)
    for pattern in (MATH, EXPRESSION, MARKED, CODE_SPAN, ADDRESS):
        joined = pattern.sub(lambda m: re.sub(r"[^\n]", "\u2007", m.group(0)), joined)
    return [
        (number, line)
        for number, line in enumerate(joined.split("\n"), start=1)
        if line.strip() and not line.lstrip().startswith(">")
    ]


def typed_numbers(text: str) -> list[str]:
    """Numbers with units that are neither computed nor marked as cited or given."""
    problems = []
    for number, line in prose(text):
        if QUESTION.match(line):
            continue
        for pattern in (NUMBER, TIMES):
            for match in pattern.finditer(line):
                words = match.group(0).strip()
                if words not in ELEMENT_SIZES:
                    problems.append(f"line {number}: typed by hand: {words!r}")
    return problems


class _Page(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()
        self.external: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {k: v for k, v in attrs if v is not None}
        for key in ("id", "name"):
            if key in values and tag != "meta":
                self.anchors.add(values[key])
        target = values.get("href") or values.get("src")
        if not target or (tag == "link" and values.get("rel") == "canonical"):
            return
        loads = tag in ("script", "img", "iframe", "source", "video", "audio") or (
            tag == "link" and values.get("rel") in ("stylesheet", "icon", "preload")
        )
        if urlsplit(target).scheme in ("http", "https") or target.startswith("//"):
            if loads:
                self.external.append(target)
        elif urlsplit(target).scheme == "":
            self.links.append(target)


@kept_by_file
def _read(path: Path) -> _Page:
    """Links and anchors of a page."""
    page = _Page()
    page.feed(path.read_text())
    return page


def dead_links(site: Path, prefix: str = "/en/") -> list[str]:
    """Links of built pages whose file or anchor does not exist."""
    pages = {path: _read(path) for path in sorted(site.rglob("*.html"))}
    problems = []
    for path, page in pages.items():
        where = path.relative_to(site)
        for link in page.links:
            target, anchor = urldefrag(link)
            target = unquote(urlsplit(target).path)
            if target.startswith(prefix):
                file = site / target.removeprefix("/")
            elif target.startswith("/"):
                file = site / prefix.strip("/") / target.removeprefix("/")
            else:
                file = (path.parent / target) if target else path
            file = Path(re.sub(r"/\./", "/", str(file))).resolve()
            if file.is_dir():
                file = file / "index.html"
            if not file.is_file():
                problems.append(f"{where}: {link}: no such file")
            elif anchor and file.suffix == ".html":
                known = pages[file].anchors if file in pages else _read(file).anchors
                if unquote(anchor) not in known:
                    problems.append(f"{where}: {link}: no such anchor")
    return problems


def third_parties(site: Path) -> list[str]:
    """Scripts, styles and pictures that a page would load from elsewhere."""
    return [
        f"{path.relative_to(site)}: {url}"
        for path in sorted(site.rglob("*.html"))
        for url in _read(path).external
    ]
