"""Pages that people write, and what they embed."""

from functools import lru_cache
from pathlib import Path

from . import config, excerpts, fences, guards, symbols


def pages() -> list[Path]:
    """Pages people write: generated ones left out."""
    return sorted(
        path
        for path in config.PAGES.rglob("*.md")
        if "generated: true" not in _read(path)[:400]
    )


def references() -> dict[str, list[Path]]:
    """Everything that some page embeds, symbols and files, and the pages."""
    found: dict[str, list[Path]] = {}
    for page in pages():
        for reference in _references(page, page.stat().st_mtime_ns):
            found.setdefault(reference, []).append(page)
    return found


def _read(path: Path) -> str:
    return _text(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=512)
def _text(path: Path, changed: int) -> str:
    del changed  # part of the key: a changed file is read again
    return path.read_text()


@lru_cache(maxsize=512)
def _references(page: Path, changed: int) -> tuple[str, ...]:
    lines = _text(page, changed).splitlines()
    parsed = (excerpts.parse(fence.body) for fence in fences.fences(lines))
    return tuple(found[0] for found in parsed if found)


def embedded() -> dict[str, list[Path]]:
    """Every symbol reference on some page, and the pages; a form is a symbol, too."""
    named = ((symbols.form_key(r) or r, where) for r, where in references().items())
    return {name: where for name, where in named if ":" in name}


class PageError(ValueError):
    """A page holds what must not be typed into one. Stops the build."""


def require_no_typed_code() -> None:
    """PageError if some page has Python typed into it."""
    problems = [
        f"{page.relative_to(config.PAGES)}, {problem}"
        for page in pages()
        for problem in guards.typed_code(page.read_text())
    ]
    if problems:
        raise PageError("\n".join(problems) + "\nEmbed a symbol or a snippet.")
