"""Write the generated parts of the site: source pages, reference pages, traces.

    python -m xtrain_docs.prebuild

Generated pages lie under docs/en/source and docs/en/reference/*/ and are not
committed. Files that would not change are left alone.
"""

import ast
import inspect
from collections import Counter
from pathlib import Path

from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer, get_lexer_for_filename
from pygments.util import ClassNotFound

from . import (
    blocks,
    config,
    embed,
    fences,
    fonts,
    guards,
    symbols,
    transcripts,
    verification,
)

SHOWN = ("src/xtrain", "src/xtrain_docs", "tests", "snippets")
INERT = {ord(c): f"&#{ord(c)};" for c in "{}[]`$\\"}
"""Characters that Markdown extensions would act on, even inside raw HTML."""
SUFFIXES = {".py", ".out", ".css", ".js", ".toml", ".yml"}


def write(path: Path, text: str) -> Path:
    """Write a file if its text changes."""
    if not path.is_file() or path.read_text() != text:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return path


def _prune(folder: Path, kept: set[Path]) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        if path.is_file() and path not in kept:
            path.unlink()
        elif path.is_dir() and not any(path.iterdir()):
            path.rmdir()


# --- source pages ----------------------------------------------------------------


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
    _prune(folder, kept)
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


# --- reference pages -------------------------------------------------------------


def modules() -> list[str]:
    """Every public module of xtrain that defines something public."""
    found = []
    for path in sorted((config.SOURCE / "xtrain").rglob("*.py")):
        parts = path.relative_to(config.SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if any(part.startswith("_") for part in parts):
            continue
        if not (path.parent / "__init__.py").is_file():
            continue
        tree = ast.parse(path.read_text())
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
        ]
        constants = [
            node
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and path.name != "__init__.py"
        ]
        if public or constants:
            found.append(".".join(parts))
    return found


def _summary(module: str) -> str:
    text = symbols.module_path(module, config.SOURCE).read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    return doc.split("\n\n")[0].replace("\n", " ").strip()


def write_reference() -> int:
    """docs/en/reference/<package>/<module>.md; returns how many."""
    folder = config.PAGES / "reference"
    kept = {folder / "index.md"}
    index = [
        "---",
        "title: Reference",
        "description: Every public name of xtrain, module by module.",
        "generated: true",
        "---",
        "",
        "# Reference",
        "",
        "Every public name, module by module, from the docstrings. The code of each "
        "one is a click away.",
        "",
    ]
    package = ""
    for module in modules():
        parts = module.split(".")
        top = ".".join(parts[:2])
        if top != package:
            package = top
            index += ["", f"## `{package}`", ""]
        page = folder / parts[1] / f"{'.'.join(parts[2:]) or 'package'}.md"
        kept.add(write(page, _reference_page(module)))
        link = page.relative_to(folder).as_posix()
        index.append(f"- [`{module}`]({link}): {_summary(module)}")
    write(folder / "index.md", "\n".join([*index, ""]))
    _prune(folder, kept)
    return len(kept)


def _reference_page(module: str) -> str:
    path = symbols.module_path(module, config.SOURCE)
    source = path.relative_to(config.SOURCE).as_posix()
    return "\n".join(
        [
            "---",
            f"title: {module}",
            f"description: Reference of {module}, from its docstrings.",
            "search: {boost: 0.6}",
            "generated: true",
            "---",
            "",
            f"# `{module}`",
            "",
            f"[{source}](/source/{source}.md){{ .xt-path }}",
            "{ .xt-bar .xt-alone }",
            "",
            f"::: {module}",
            "",
        ]
    )


# --- pages and their blocks ------------------------------------------------------


def pages() -> list[Path]:
    """Pages people write: generated ones left out."""
    return sorted(
        path
        for path in config.PAGES.rglob("*.md")
        if "generated: true" not in path.read_text()[:400]
    )


def references() -> dict[str, list[Path]]:
    """Everything that some page embeds, symbols and files, and the pages."""
    found: dict[str, list[Path]] = {}
    for page in pages():
        for fence in fences.fences(page.read_text().splitlines()):
            if parsed := embed.parse(fence.body):
                found.setdefault(parsed[0], []).append(page)
    return found


def embedded() -> dict[str, list[Path]]:
    """Every symbol reference on some page, and the pages."""
    return {name: where for name, where in references().items() if ":" in name}


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
        raise PageError(
            "\n".join(problems)
            + "\nEmbed a symbol or a snippet, or mark the fence .pseudo or .wrong."
        )


# --- ledger ----------------------------------------------------------------------


def write_ledger() -> int:
    """docs/en/verification/ledger.md: every symbol with its evidence."""
    ledger = verification.ledger()
    shown = {
        f"{reference.split(':')[0]}:{reference.split(':')[1].split('.')[0]}"
        for reference in embedded()
    }
    by_module: dict[str, list[verification.Summary]] = {}
    for key in sorted({*ledger.symbols(), *shown}):
        if summary := ledger.summary_or_none(key):
            by_module.setdefault(key.split(":")[0], []).append(summary)
    lines = _ledger_head(by_module)
    for module, summaries in by_module.items():
        lines += [f"## `{module}`", ""]
        for summary in summaries:
            lines += _ledger_entry(summary)
    write(config.PAGES / "verification" / "ledger.md", "\n".join([*lines, ""]))
    return sum(map(len, by_module.values()))


def _ledger_head(by_module: dict[str, list[verification.Summary]]) -> list[str]:
    summaries = [s for group in by_module.values() for s in group]
    head = [
        "---",
        "title: Ledger",
        "description: Which test verifies which function, where and when.",
        "generated: true",
        "search: {exclude: true}",
        "---",
        "",
        "# Ledger",
        "",
    ]
    if not summaries:
        return [
            *head,
            "No test run is recorded yet. The next one fills this page:",
            "{ .xt-empty }",
            "",
            "```console",
            f"$ {config.VERIFY_COMMAND}",
            "```",
        ]
    good = sum(s.verified for s in summaries)
    runs = sorted({
        (e.day, e.backend, e.device, e.torch, e.platform)
        for s in summaries
        for e in s.current
        if e.passed
    })  # fmt: skip
    tests = len({t["id"] for s in summaries for e in s.current for t in e.passed})
    head += [
        f"{good} of {len(summaries)} functions and classes are verified on their "
        f"current source, by {tests} tests.",
        "",
        "| backend | device | torch | platform | last run |",
        "| :--- | :--- | :--- | :--- | :--- |",
    ]
    places = {run[1:]: run[0] for run in runs}
    head += [
        f"| {backend} | {device} | {torch} | {platform} | "
        f"{verification.pretty_day(day)} |"
        for (backend, device, torch, platform), day in sorted(places.items())
    ]
    return [*head, ""]


def _ledger_entry(summary: verification.Summary) -> list[str]:
    name = summary.symbol.split(":")[1]
    state = "verified" if summary.verified else "unverified"
    found = symbols.resolve(summary.symbol)
    place = f"{found.path}:{found.first}".removeprefix("src/")
    url = config.source_url(found.path, found.first, found.last)
    lines = [
        f"### `{name}` {{ #{embed.anchor(summary.symbol)} .xt-ledger-{state} }}",
        "",
        f"[{place}]({url}){{ .xt-path }}",
        "",
    ]
    runs: dict[str, dict[str, set[int]]] = {}
    failed: set[str] = set()
    cases: Counter[str] = Counter()
    for item in summary.current:
        for test in item.tests:
            name = _function(test["id"])
            cases[name] += 1
            where = runs.setdefault(name, {})
            sizes = where.setdefault(f"{item.backend} on {item.device}", set())
            sizes.update(test.get("world_sizes") or ())
            if test["outcome"] not in ("passed", "skipped"):
                failed.add(name)
    if not runs:
        why = "the source has changed since" if summary.stale else "no test names it"
        return [*lines, f"Not verified: {why}.", ""]
    lines += ["| test | cases | where | ranks |", "| :--- | ---: | :--- | :--- |"]
    for name, where in sorted(runs.items()):
        result = " **fails**" if name in failed else ""
        for place, sizes in sorted(where.items()):
            ranks = ", ".join(map(str, sorted(sizes))) or "none"
            lines.append(
                f"| {_test_link(name)}{result} | {cases[name]} | {place} | {ranks} |"
            )
    return [*lines, ""]


def _function(test_id: str) -> str:
    """tests/a.py::test_b[4-float] as tests/a.py::test_b."""
    return test_id.split("[")[0]


def _test_link(test: str) -> str:
    path, _, name = test.partition("::")
    name = name.split("::")[-1]
    try:
        url = embed.evidence_link("test", f"{path}::{name}")
    except embed.EmbedError:
        return f"`{test}`"
    return f"[`{name}`]({url})"


def record_traces() -> int:
    """Run every collective that some page animates; returns how many."""
    done = set()
    for page in pages():
        for fence in fences.fences(page.read_text().splitlines()):
            if fence.language == "trace" and fence.info not in done:
                found = blocks.parse_info(fence.info)
                assert found is not None
                blocks.registry("trace").run(found[1], found[2])
                done.add(fence.info)
    return len(done)


def main() -> None:
    """Check the pages, then write everything, saying what."""
    if not config.draft():
        require_no_typed_code()
        transcripts.require_embedded()
        print("transcripts: as fresh runs print them")
    print(f"fonts: {fonts.write_fonts()} faces")
    print(f"source pages: {write_source_pages()}")
    print(f"reference pages: {write_reference()}")
    print(f"ledger: {write_ledger()} symbols")
    print(f"traces: {record_traces()} recorded or still current")


if __name__ == "__main__":
    main()
