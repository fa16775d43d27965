"""A page for each source file, with an anchor on every line: docs/en/source/**."""

import inspect
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from . import blocks, config, symbols
from .generated import prune, write

SHOWN = ("src/xtrain", "src/xtrain_docs", "tests", "snippets", "docs/data/spine")
INERT = {ord(c): f"&#{ord(c)};" for c in "{}[]`$\\"}
"""Characters that Markdown extensions would act on, even inside raw HTML."""
SUFFIXES = {".py", ".out", ".css", ".js", ".json", ".toml", ".yml"}


def source_files() -> list[Path]:
    """Every file of ours that has a source page."""
    return sorted(
        path
        for folder in SHOWN
        for path in (config.ROOT / folder).rglob("*")
        if path.is_file()
        and path.suffix in SUFFIXES
        and "__pycache__" not in path.parts
        and ".egg-info" not in str(path)
    )


def source_page(path: Path) -> str:
    """One source file as a page with an anchor L<n> on every line."""
    name = path.relative_to(config.ROOT).as_posix()
    text = path.read_text()
    made = _made_from(text)
    try:
        lexer = get_lexer_for_filename(path.name, stripnl=False)
    except ClassNotFound:
        lexer = PythonLexer(stripnl=False)
    body = highlight(text, lexer, HtmlFormatter(nowrap=True)).rstrip("\n")
    body = body.translate(INERT)
    lines = [
        f'<span class="xt-line" id="L{i}"><a href="#L{i}" tabindex="-1" '
        f'aria-hidden="true" data-n="{i}"></a>{line or " "}</span>'
        for i, line in enumerate(body.split("\n"), start=1)
    ]
    shown = name.removeprefix("src/")
    count = len(lines)
    return "\n".join(
        [
            "---",
            f"title: {shown}",
            f"description: Source of {shown}, {count} lines.",
            "search:",
            "  exclude: true",
            "hide: [toc, navigation]",
            "generated: true",
            made,
            "---",
            "",
            f"# `{shown}` {{ .xt-source-title }}",
            "",
            blocks.RAW[0],
            '<div class="highlight xt-source" tabindex="0"><pre><code>'
            + "\n".join(lines)
            + "</code></pre></div>",
            blocks.RAW[1],
            "",
        ]
    )


def _made_from(text: str) -> str:
    """A line that changes when the source or the way it is shown does."""
    return f"made_from: {symbols.digest(text + inspect.getsource(source_page))}"


def write_source_pages() -> int:
    """docs/en/source/**; returns how many."""
    folder = config.PAGES / "source"
    kept = set()
    for path in source_files():
        name = path.relative_to(config.ROOT).as_posix().removeprefix("src/")
        page = folder / f"{name}.md"
        kept.add(page)
        if page.is_file() and _made_from(path.read_text()) in page.read_text()[:600]:
            continue
        write(page, source_page(path))
    kept.add(write(folder / "index.md", _source_index()))
    prune(folder, kept)
    return len(kept)


def _source_index() -> str:
    lines = [
        "---",
        "title: Source files",
        "search: {exclude: true}",
        "hide: [toc]",
        "generated: true",
        "---",
        "",
        "# Source files",
        "",
    ]
    for folder in SHOWN:
        lines += [f"## {folder}", ""]
        for path in source_files():
            name = path.relative_to(config.ROOT).as_posix()
            if name.startswith(folder + "/"):
                short = name.removeprefix("src/")
                lines.append(f"- [{name.removeprefix(folder + '/')}]({short}.md)")
        lines.append("")
    return "\n".join(lines)
