"""Find the fenced blocks of a Markdown page, at any indentation."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

OPEN = re.compile(r"^(?P<indent>[ \t>]*)(?P<mark>`{3,}|~{3,})(?P<info>[^`]*)$")


@dataclass(frozen=True)
class Fence:
    """Lines `start` to `end` (from 0, both fence lines included)."""

    start: int
    end: int
    indent: str
    info: str
    body: list[str]

    @property
    def language(self) -> str:
        """The first word after the marks, in either spelling."""
        match = re.match(r"\{?\s*\.?([\w+-]*)", self.info)
        return match.group(1) if match else ""

    @property
    def classes(self) -> list[str]:
        """Classes given as ``{.py .wrong}``."""
        return re.findall(r"\.([\w-]+)", self.info)


def fences(lines: list[str]) -> Iterator[Fence]:
    """Yield the outermost fences of a page, in order."""
    at = 0
    while at < len(lines):
        match = OPEN.match(lines[at])
        if not match:
            at += 1
            continue
        indent, mark = match["indent"], match["mark"]
        close = re.compile(rf"^[ \t>]*{re.escape(mark[0])}{{{len(mark)},}}\s*$")
        end = next(
            (i for i in range(at + 1, len(lines)) if close.match(lines[i])),
            len(lines) - 1,
        )
        body = [line.removeprefix(indent) for line in lines[at + 1 : end]]
        yield Fence(at, end, indent, match["info"].strip(), body)
        at = end + 1


def replace(lines: list[str], make: Callable[[Fence], list[str] | None]) -> list[str]:
    """Replace each fence for which `make(fence)` returns lines."""
    out: list[str] = []
    at = 0
    for fence in fences(lines):
        new = make(fence)
        if new is None:
            continue
        out += lines[at : fence.start]
        out += [(fence.indent + line).rstrip() for line in new]
        at = fence.end + 1
    return out + lines[at:]
