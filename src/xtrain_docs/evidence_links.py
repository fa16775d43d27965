"""Links on pages to tests, sources and files, by name."""

import re
from functools import lru_cache
from pathlib import Path

from . import config
from .excerpts import EmbedError
from .symbols import resolve

LINK = re.compile(r"\]\((?P<kind>test|src|file):(?P<target>[^)\s]+)\)")


def evidence_link(kind: str, target: str) -> str:
    """Resolve `test:tests/a.py::name`, `src:module:name`, `file:path`."""
    if kind == "src":
        symbol = resolve(target)
        return config.source_url(symbol.path, symbol.first, symbol.last)
    path, _, name = target.partition("::")
    file = config.ROOT / path
    if not file.is_file():
        raise EmbedError(f"{kind}:{target}: there is no {path}")
    if kind == "file" or not name:
        return config.source_url(path, 1, 1)
    number = _definitions(file, file.stat().st_mtime_ns).get(name)
    if number:
        return config.source_url(path, number, number)
    raise EmbedError(f"test:{target}: {path} has no {name!r}")


@lru_cache(maxsize=512)
def _definitions(file: Path, stamp: int) -> dict[str, int]:
    """The line on which each function and class of a file begins."""
    del stamp  # part of the key: a changed file is read again
    found: dict[str, int] = {}
    for number, line in enumerate(file.read_text().splitlines(), start=1):
        if match := re.match(r"\s*(?:async )?(?:def|class) (\w+)", line):
            found.setdefault(match[1], number)
    return found
