"""Show a symbol of the source, or a snippet, by name.

A fence whose first line is ``--8<-- "package.module:name"`` becomes a bar (place in
the source, reference entry, and of a public name the command that copies it), the code
as it is in the source today, and a line saying which tests verify it. The lines
after the first are options: see `excerpts`.

Whole files work too: ``--8<-- "snippets/lc1/name.py"`` and ``.out``. A whiteboard form,
``--8<-- "src/xtrain/whiteboard/comm/name.py"``, is downloaded with its self-check and
carries the verified line of the symbol it is named after.
"""

import re
from functools import lru_cache, partial
from pathlib import Path

from markdown.postprocessors import Postprocessor
from markdown.preprocessors import Preprocessor

from xtrain.copying import whiteboard
from xtrain.copying.library import library

from . import config, fences, symbols, verification
from .blocks import RAW
from .downloads import data_url
from .evidence_links import LINK, Place, evidence_place, opened_blocks
from .excerpts import EmbedError, Options, annotate, parse, shown_lines
from .places import places
from .symbols import SymbolError, resolve

MESSAGE_COLUMNS = 140
"""A line of a transcript that is longer is a message, and wrapped."""


@lru_cache(maxsize=1)
def library_names() -> dict[str, str]:
    """The names that `xtrain copy NAME --library` accepts."""
    return library()


def verified_line(key: str) -> list[str]:
    """One Markdown paragraph: which tests verify this, where, and when."""
    try:
        summary = verification.check(key)
    except verification.UnverifiedError as problem:
        if not config.draft():
            raise
        return ["", f"Not verified: {problem}", "{ .xt-verified .xt-unverified }", ""]
    tests = f"{summary.passed} test{'s' if summary.passed != 1 else ''}"
    page = f"/verification/ledger/{room(key.partition(':')[0])}.md"
    parts = [f"[Verified by {tests}]({page}#{anchor(key)})"]
    if where := places(summary.good):
        parts.append(where)
    parts.append(verification.pretty_day(summary.day))
    return ["", " · ".join(parts), "{ .xt-verified }", ""]


def room(module: str) -> str:
    """What has a page of the ledger: "comm" of "xtrain.comm.ring"."""
    return [*module.split("."), module][1]


def anchor(key: str) -> str:
    """The id of a symbol's row on its page of the ledger."""
    return "verified-" + key.replace(":", ".")


def symbol_block(reference: str, options: Options, language: str) -> list[str]:
    """The Markdown of an embedded symbol."""
    symbol, public = resolve(reference), library_names()
    lines, attributes = annotate(shown_lines(symbol, options), options, reference)
    place = Place(symbol.path, symbol.first, symbol.last)
    bar = [path_in_bar(f"{symbol.path}:{symbol.first}", place.url)]
    if not any(part.startswith("_") for part in symbol.dotted.split(".")):
        bar.append(f"[API][{symbol.entry}]{{ .xt-api }}")
    room = ".".join(reference.split(".")[:2])
    if public.get(symbol.name, "").startswith(f"{room}."):
        bar.append(f"`xtrain copy {symbol.name} --library -o DIR`")
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


def path_in_bar(path: str, url: str) -> str:
    """The path of the code below, as Markdown; a link when a repository is named."""
    shown = path.removeprefix("src/")
    link = f"[{shown}]({url})" if url else f"`{shown}`"
    return f"{link}{{ .xt-path }}"


def file_block(reference: str, options: Options, fence: fences.Fence) -> list[str]:
    """The Markdown of a whole file of the repository."""
    path = config.ROOT / reference
    if not path.is_file() or not path.resolve().is_relative_to(config.ROOT):
        raise EmbedError(f"{reference}: there is no such file")
    text = path.read_text().rstrip("\n")
    if path.suffix == ".out":
        return transcript_block(path, text)
    lines, attributes = annotate(text.splitlines(), options, reference)
    wrong = "wrong" in fence.classes or reference.startswith("snippets/wrong/")
    kind = " .xt-wrong" if wrong else ""
    bar = path_in_bar(reference, Place(reference, 1, len(lines)).url)
    form = symbols.form_key(reference)
    if form:
        bar += f" [API][{form.replace(':', '.')}]{{ .xt-api }}"
    if path.suffix == ".py":
        link = data_url(download(path) if form else text + "\n")
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
        *(verified_line(form) if form else [""]),
    ]


def download(form: Path) -> str:
    """A whiteboard form with its self-check; EmbedError if it has none."""
    try:
        return whiteboard(form.stem, config.SOURCE / "xtrain")
    except FileNotFoundError as problem:
        raise EmbedError(f"{form.name} has no self-check: {problem}") from problem


def transcript_block(path: Path, text: str) -> list[str]:
    """What a snippet printed, under the command that ran it."""
    script = path.with_suffix(".py")
    if not script.is_file():
        raise EmbedError(f"{path.name} is a transcript without its {script.name}")
    command = script.read_text().splitlines()[0].removeprefix("#").strip()
    messages = any(len(line) > MESSAGE_COLUMNS for line in text.splitlines())
    return [
        "",
        "Recorded output, compared with a fresh run by the tests",
        f"{{ .xt-bar .xt-recorded{' .xt-messages' if messages else ''} }}",
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


class LinkPreprocessor(Preprocessor):
    """Links tests and sources by name with their code at the end of the page."""

    def run(self, lines: list[str]) -> list[str]:
        named: dict[Place, None] = {}
        lines = [LINK.sub(partial(self._link, named), line) for line in lines]
        if not named:
            return lines
        return [*lines, "", RAW[0], *opened_blocks(named).split("\n"), RAW[1]]

    def _link(self, named: dict[Place, None], match: re.Match) -> str:
        try:
            place = evidence_place(match["kind"], match["target"])
            named[place] = None
            return f"](#{place.id})"
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
