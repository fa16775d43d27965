"""Links on pages to tests, sources and files, by name: their code opens in the page.

`[the test](test:tests/a.py::name)` leads to a closed block at the end of its page, with
the code of that test; a browser opens it. `src:module:name` and `file:path` likewise.
"""

import ast
import html
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from . import config
from .excerpts import EmbedError
from .generated import kept_by_file
from .symbols import resolve

LINK = re.compile(r"\]\((?P<kind>test|src|file):(?P<target>[^)\s]+)\)")
INERT = {ord(c): f"&#{ord(c)};" for c in "{}[]`$\\"}
"""Characters that Markdown extensions would act on, even inside raw HTML."""


@dataclass(frozen=True)
class Place:
    """Lines `first` to `last` (from 1) of a file of the repository."""

    path: str
    first: int
    last: int

    @property
    def id(self) -> str:
        """Its name on a page."""
        return re.sub(r"\W+", "-", f"code-{self.path}-{self.first}")

    @property
    def url(self) -> str:
        """Where a repository shows it; empty when none is named."""
        return config.source_url(self.path, self.first, self.last)

    def code(self) -> str:
        """The lines."""
        lines = (config.ROOT / self.path).read_text().splitlines()
        return "\n".join(lines[self.first - 1 : self.last])


def evidence_place(kind: str, target: str) -> Place:
    """Resolve `test:tests/a.py::name`, `src:module:name`, `file:path`."""
    if kind == "src":
        symbol = resolve(target)
        return Place(symbol.path, symbol.first, symbol.last)
    path, _, name = target.partition("::")
    file = config.ROOT / path
    if not file.is_file():
        raise EmbedError(f"{kind}:{target}: there is no {path}")
    if kind == "file" or not name:
        return Place(path, 1, len(file.read_text().splitlines()))
    lines = _definitions(file).get(name)
    if lines:
        return Place(path, *lines)
    raise EmbedError(f"test:{target}: {path} has no {name!r}")


@kept_by_file
def _definitions(file: Path) -> dict[str, tuple[int, int]]:
    """The lines of each function and class of a file, its decorators included."""
    found: dict[str, tuple[int, int]] = {}
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            first = min(n.lineno for n in (node, *node.decorator_list))
            found.setdefault(node.name, (first, node.end_lineno or first))
    return found


def closed_block(label: str, code: str, url: str, name: str = "") -> str:
    """A closed block with code, plain: highlighting makes it five times as long."""
    away = f'<a href="{html.escape(url)}">in the repository</a>' if url else ""
    named = f' id="{name}"' if name else ""
    return (
        f'<details class="xt-file"{named} data-search-exclude>'
        f"<summary>{html.escape(label)}</summary>{away}"
        '<div class="language-text highlight"><pre><span></span><code>'
        f"{html.escape(code, quote=False).translate(INERT)}\n"
        "</code></pre></div></details>"
    )


def opened_blocks(places: Iterable[Place]) -> str:
    """The code that a page names, for its end."""
    blocks = (
        closed_block(
            f"{place.path.removeprefix('src/')}:{place.first}",
            place.code(),
            place.url,
            place.id,
        )
        for place in places
    )
    lead = "<hr>\n<p>The code that this page links to:</p>"
    inside = "\n".join([lead, *blocks])
    return f'<section aria-label="Code named on this page">\n{inside}\n</section>'
