"""Which lines of a symbol a page shows.

Options follow the reference in a fence, one a line:

    doc: off                  leave the docstring out
    show: TEXT                only this statement (more than once if need be)
    show: TEXT @to TEXT       only these lines
    hl: TEXT                  highlight the line
    note: TEXT                hang the next point of the list below on the line

TEXT must occur in exactly one line of the symbol: a page fails rather than drifts.
"""

import re
from dataclasses import dataclass, field

from .symbols import Symbol

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
