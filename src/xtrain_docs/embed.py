"""Markdown extension: show a symbol of the source, or a snippet, by name.

A fence whose first line is ``--8<-- "package.module:name"`` becomes a bar (place in
the source, reference entry, a copy that stands alone), the code as it is in the
source today, and a line saying which tests verify it. Options follow, one a line:

    doc: off                  leave the docstring out
    show: TEXT                only this statement (more than once if need be)
    show: TEXT @to TEXT       only these lines
    hl: TEXT                  highlight the line
    note: TEXT                hang the next point of the list below on the line

TEXT must occur in exactly one line of the symbol: a page fails rather than drifts.
Whole files work too: ``--8<-- "snippets/lc1/name.py"`` and ``.out``.
"""

import base64
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from markdown import Markdown
from markdown.extensions import Extension
from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

from . import config, fences, verification
from .standalone import standalone
from .symbols import Symbol, SymbolError, resolve

REFERENCE = re.compile(r'^-{1,}8<-{1,} "(?P<what>[^"]+)"\s*$')
OPTION = re.compile(r"^(?P<key>doc|show|hl|note): (?P<text>.+)$")


class EmbedError(ValueError):
    """A page asks for code that cannot be shown as asked. Stops the build."""


@dataclass
class Options:
    """What a fence asks for besides the code itself."""

    doc: bool = True
    show: list[str] = field(default_factory=list)
    highlight: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def parse(body: list[str]) -> tuple[str, Options] | None:
    """The reference and options of a fence's body; None if it embeds nothing."""
    if not body or not (match := REFERENCE.match(body[0])):
        return None
    options = Options()
    for line in filter(str.strip, body[1:]):
        option = OPTION.match(line)
        if not option:
            raise EmbedError(
                f"{match['what']}: {line!r} is not an option (doc, show, hl, note)"
            )
        key, text = option["key"], option["text"]
        if key == "doc":
            if text != "off":
                raise EmbedError(f"{match['what']}: doc can only be off, not {text}")
            options.doc = False
        else:
            {"show": options.show, "hl": options.highlight, "note": options.notes}[
                key
            ].append(text)
    return match["what"], options


def find_line(lines: list[str], text: str, where: str) -> int:
    """The index of the one line that contains `text`."""
    hits = [i for i, line in enumerate(lines) if text in line]
    if len(hits) != 1:
        raise EmbedError(
            f"{where}: {text!r} occurs in {len(hits)} lines, not in exactly one"
        )
    return hits[0]


def _statement(lines: list[str], at: int) -> range:
    """The lines of the statement that starts at index `at`, by indentation."""
    depth = len(lines[at]) - len(lines[at].lstrip())
    end = at + 1
    for i in range(at + 1, len(lines)):
        line = lines[i]
        if not line.strip():
            continue
        inner = len(line) - len(line.lstrip())
        closes = inner == depth and line.strip()[0] in ")]}"
        if inner <= depth and not closes:
            break
        end = i + 1
    return range(at, end)


def shown_lines(symbol: Symbol, options: Options) -> list[str]:
    """The symbol's lines after doc and show, dedented, with `# ...` for cuts."""
    where = f"{symbol.module}:{symbol.name}"
    lines = symbol.source.splitlines()
    keep = set(range(len(lines)))
    if not options.doc and symbol.docstring:
        first, last = (n - symbol.first for n in symbol.docstring)
        keep -= set(range(first, last + 1))
        if last + 1 < len(lines) and not lines[last + 1].strip():
            keep.discard(last + 1)
    if options.show:
        shown: set[int] = set()
        for text in options.show:
            head, to, tail = text.partition(" @to ")
            at = find_line(lines, head, where)
            if to:
                shown |= set(range(at, find_line(lines, tail, where) + 1))
            else:
                shown |= set(_statement(lines, at))
        keep = (keep & shown) | set(_signature(lines))
    out: list[str] = []
    cut = False
    for i, line in enumerate(lines):
        if i in keep:
            if cut and options.show:
                indent = len(line) - len(line.lstrip())
                out.append(" " * indent + "# ...")
            out.append(line)
            cut = False
        elif line.strip() and not _in(symbol.docstring, symbol.first + i, options):
            cut = True
    if cut and options.show:
        out.append("    # ...")
    margin = min(
        (len(line) - len(line.lstrip()) for line in out if line.strip()), default=0
    )
    return [line[margin:] for line in out]


def _in(docstring: tuple[int, int] | None, line: int, options: Options) -> bool:
    return (
        not options.doc
        and docstring is not None
        and docstring[0] <= line <= docstring[1]
    )


def _signature(lines: list[str]) -> range:
    """The lines of the def or class statement itself, decorators included."""
    for i, line in enumerate(lines):
        if line.rstrip().endswith(":"):
            return range(i + 1)
    return range(1)


def annotate(lines: list[str], options: Options, where: str) -> tuple[list[str], str]:
    """Hang the notes on their lines; return lines and the hl_lines attribute."""
    numbers = [find_line(lines, text, where) + 1 for text in options.highlight]
    out = list(lines)
    for count, text in enumerate(options.notes, start=1):
        at = find_line(lines, text, where)
        out[at] += f" ({count})!" if "#" in out[at] else f"  # ({count})!"
    marked = " ".join(map(str, sorted(numbers)))
    return out, f' hl_lines="{marked}"' if marked else ""


def data_url(text: str) -> str:
    """The text as a link that needs no file: it works without a server."""
    coded = base64.b64encode(text.encode()).decode()
    return f"data:text/x-python;base64,{coded}"


def verified_line(key: str) -> list[str]:
    """One Markdown paragraph: which tests verify this, where, and when."""
    try:
        summary = verification.check(key)
    except verification.UnverifiedError as problem:
        if not config.draft():
            raise
        return ["", f"Not verified: {problem}", "{ .xt-verified .xt-unverified }", ""]
    tests = f"{summary.passed} test{'s' if summary.passed != 1 else ''}"
    parts = [f"[Verified by {tests}](/verification/ledger.md#{anchor(key)})"]
    parts.append(", ".join(summary.places))
    if summary.world_sizes:
        sizes = ", ".join(map(str, summary.world_sizes))
        ranks = "rank" if summary.world_sizes == [1] else "ranks"
        parts.append(f"{sizes} {ranks}")
    parts.append(verification.pretty_day(summary.day))
    return ["", " · ".join(parts), "{ .xt-verified }", ""]


def anchor(key: str) -> str:
    """The id of a symbol's row on the ledger page."""
    return "verified-" + key.replace(":", ".")


def symbol_block(reference: str, options: Options, language: str) -> list[str]:
    """The Markdown that stands for an embedded symbol."""
    symbol = resolve(reference)
    where = f"{symbol.path}:{symbol.first}"
    lines, attributes = annotate(shown_lines(symbol, options), options, reference)
    url = config.source_url(symbol.path, symbol.first, symbol.last)
    bar = [f"[{where.removeprefix('src/')}]({url}){{ .xt-path }}"]
    if not any(part.startswith("_") for part in symbol.dotted.split(".")):
        bar.append(f"[API][{symbol.dotted}]{{ .xt-api }}")
    if "." not in symbol.name:
        name = f"{symbol.name}.py"
        link = data_url(standalone(reference))
        bar.append(f'[copy with imports]({link}){{ .xt-standalone download="{name}" }}')
    return [
        "",
        " ".join(bar),
        "{ .xt-bar }",
        "",
        f"```{language or 'py'}{attributes}",
        *lines,
        "```",
        *verified_line(symbol.key),
    ]


def file_block(reference: str, options: Options, fence: fences.Fence) -> list[str]:
    """The Markdown that stands for a whole file of the repository."""
    path = config.ROOT / reference
    if not path.is_file() or not path.resolve().is_relative_to(config.ROOT):
        raise EmbedError(f"{reference}: there is no such file")
    text = path.read_text().rstrip("\n")
    if path.suffix == ".out":
        return transcript_block(path, text)
    lines, attributes = annotate(text.splitlines(), options, reference)
    wrong = "wrong" in fence.classes or reference.startswith("snippets/wrong/")
    kind = " .xt-wrong" if wrong else ""
    bar = f"[{reference}]({config.source_url(reference, 1, len(lines))}){{ .xt-path }}"
    if path.suffix == ".py":
        link = data_url(text + "\n")
        bar += f' [download]({link}){{ .xt-download download="{path.name}" }}'
    language = {".py": "py", ".toml": "toml", ".yml": "yaml"}.get(path.suffix, "text")
    return [
        "",
        bar,
        f"{{ .xt-bar{kind} }}",
        "",
        f"```{language}{attributes}",
        *lines,
        "```",
        "",
    ]


def transcript_block(path: Path, text: str) -> list[str]:
    """What a snippet printed, under the command that ran it."""
    script = path.with_suffix(".py")
    if not script.is_file():
        raise EmbedError(f"{path.name} is a transcript without its {script.name}")
    command = script.read_text().splitlines()[0].removeprefix("#").strip()
    return [
        "",
        "Recorded output, compared with a fresh run by the tests",
        "{ .xt-bar .xt-recorded }",
        "",
        "```console",
        f"$ {command}",
        *text.splitlines(),
        "```",
        "",
    ]


class EmbedPreprocessor(Preprocessor):
    """Turns embedding fences into plain Markdown, before anything else runs."""

    def run(self, lines: list[str]) -> list[str]:
        return fences.replace(lines, self._block)

    def _block(self, fence: fences.Fence) -> list[str] | None:
        try:
            return self._embed(fence)
        except (EmbedError, SymbolError) as problem:
            return config.draft_note(problem)

    def _embed(self, fence: fences.Fence) -> list[str] | None:
        found = parse(fence.body)
        if found is None:
            return None
        reference, options = found
        if reference.endswith((".py", ".out", ".toml", ".yml")):
            return file_block(reference, options, fence)
        if ":" not in reference:
            raise EmbedError(f"{reference!r}: neither package.module:name nor a file")
        return symbol_block(reference, options, fence.language)


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


class LinkPreprocessor(Preprocessor):
    """Turns links to tests and sources by name into links to their lines."""

    def run(self, lines: list[str]) -> list[str]:
        return [LINK.sub(self._link, line) for line in lines]

    def _link(self, match: re.Match) -> str:
        try:
            return f"]({evidence_link(match['kind'], match['target'])})"
        except (EmbedError, SymbolError):
            if config.draft():
                return '](# "no such evidence")'
            raise


NOTE = re.compile(r'<span class="c1">(?P<words>#.*?)\((?P<n>\d+)\)!</span>')


class NotePostprocessor(Postprocessor):
    """Draws the marks of notes: badges that are not part of the copied code."""

    def run(self, text: str) -> str:
        return NOTE.sub(self._badge, text)

    def _badge(self, match: re.Match) -> str:
        words = match["words"].rstrip()
        comment = "" if words == "#" else f'<span class="c1">{words}</span> '
        number = match["n"]
        return (
            f'{comment}<span class="xt-note" data-n="{number}" role="img" '
            f'aria-label="note {number}"></span>'
        )


class EmbedExtension(Extension):
    """`xtrain_docs.embed` in mkdocs.yml."""

    def extendMarkdown(self, md: Markdown) -> None:
        md.preprocessors.register(EmbedPreprocessor(md), "xtrain-embed", 45)
        md.preprocessors.register(LinkPreprocessor(md), "xtrain-links", 46)
        md.postprocessors.register(NotePostprocessor(md), "xtrain-notes", 5)


def makeExtension(**options: Any) -> EmbedExtension:
    """Called by Python-Markdown."""
    return EmbedExtension(**options)


__all__ = ["EmbedError", "SymbolError", "makeExtension"]
