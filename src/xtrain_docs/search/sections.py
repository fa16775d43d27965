"""The searched words of a page: its HTML cut at headings, without figures and code.

Left out are drawings, formulas, listings (but for the names that they define) and what
says `data-search-exclude`. A cell of a table stays apart from the next. A question that
folds is a section of its own, found at the heading above it.
"""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from typing import NamedTuple

SILENT = {"svg", "math", "script", "style", "button", "template", "xtrain-calculator"}
INLINE = {"a", "abbr", "b", "code", "em", "i", "mark", "small", "span", "strong", "sub"}
INLINE |= {"sup", "kbd", "q", "wbr"}
MARKS = {
    "headerlink",
    "anchor-link",
    "jp-CodeMirrorEditor",
    "xt-bar",
    "xt-verified",
    "doc-signature",
    "doc-labels",
}
VOID = {"area", "br", "col", "hr", "img", "input", "link", "meta", "source", "wbr"}
HEADINGS = {"h1", "h2", "h3"}
DEFINED = re.compile(r"^\s*(?:def|class) ([A-Za-z]\w*)", re.MULTILINE)
WORD = re.compile(r"[A-Za-z]{3}")


@dataclass
class Section:
    """A heading, the words below it, and the names that its code defines."""

    anchor: str
    title: str = ""
    text: str = ""
    names: list[str] = field(default_factory=list)


def sections(html: str) -> list[Section]:
    """The sections of an article in the order of the page."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    for section in reader.found:
        section.title = _one_line(section.title)
        section.text = _one_line(section.text)
    return [s for s in reader.found if s.title or s.text or s.names]


def _one_line(text: str) -> str:
    return re.sub(r"\s+([.,;:!?])(?=\s|$)", r"\1", " ".join(text.split()))


class _Element(NamedTuple):
    tag: str
    silent: bool
    heading: bool
    question: bool


class _Reader(HTMLParser):
    """Collects words; knows the elements that are open where it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.found = [Section("")]
        self._open: list[_Element] = []
        self._listing: list[str] | None = None
        self._cell: list[str] | None = None
        self._cells: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        marks = set((named.get("class") or "").split())
        heading = self._begins(tag, named.get("id"))
        if tag == "table":
            self._cells = set()
        elif tag in {"td", "th"}:
            self._cell = []
        elif tag == "pre":
            self._listing = []
        if tag not in INLINE:
            self._add(" ")
        if tag not in VOID:
            silent = tag in SILENT or bool(marks & MARKS)
            silent = silent or "data-search-exclude" in named
            question = tag == "details" and "question" in marks
            self._open.append(_Element(tag, silent, heading, question))

    def _begins(self, tag: str, anchor: str | None) -> bool:
        """Begin a section here, if it is a heading or the summary of a question."""
        if tag in HEADINGS and anchor:
            self.found.append(Section(anchor))
            return True
        if tag == "summary" and self._open and self._open[-1].question:
            self.found.append(Section(self.found[-1].anchor))
            return True
        return False

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID or all(tag != one.tag for one in self._open):
            return
        if tag == "pre" and self._listing is not None:
            listing, self._listing = "".join(self._listing), None
            if not self._silent():
                self.found[-1].names += DEFINED.findall(listing)
        if tag in {"td", "th"} and self._cell is not None:
            self._end_cell()
        while self._open.pop().tag != tag:
            pass
        if tag not in INLINE:
            self._add(" ")

    def handle_data(self, data: str) -> None:
        if self._listing is not None:
            self._listing.append(data)
        elif not self._silent():
            self._add(data)

    def _end_cell(self) -> None:
        """Keep a cell that has words, once in its table."""
        cell, self._cell = " ".join("".join(self._cell or []).split()), None
        if WORD.search(cell) and cell not in self._cells:
            self._cells.add(cell)
            self._add(f" {cell} \u00b7 ")

    def _silent(self) -> bool:
        return any(one.silent for one in self._open)

    def _add(self, text: str) -> None:
        if self._listing is not None:
            return
        if self._cell is not None:
            self._cell.append(text)
        elif any(one.heading for one in self._open):
            self.found[-1].title += text
        else:
            self.found[-1].text += text
