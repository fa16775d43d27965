"""Pages that people write, and what they embed."""

from pathlib import Path

from . import config, excerpts, fences, guards, symbols
from .generated import kept_by_file


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
        for reference in _references(page):
            found.setdefault(reference, []).append(page)
    return found


@kept_by_file
def _read(path: Path) -> str:
    return path.read_text()


@kept_by_file
def _references(page: Path) -> tuple[str, ...]:
    lines = _read(page).splitlines()
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
