"""Tables that pages show: functions registered here return a Table.

    @REGISTRY
    def my_table(ranks: int = 8) -> Table: ...

A page then says ```` ```table my_table ranks=4 ````. What is no table, such as a
list of links, is returned as lines of Markdown.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from ..amounts import NO_BREAK, UNIT
from ..blocks import Registry

REGISTRY = Registry("table")


@dataclass(frozen=True)
class Table:
    """Rows of text (inline Markdown and `$math$` allowed).

    Attributes:
        header: one text per column.
        rows: one sequence of texts per row.
        align: one of "l", "r", "c" per column, as in "lrr"; default all left.
    """

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    align: str = ""

    def markdown(self) -> list[str]:
        """The table as Markdown lines."""
        align = self.align or "l" * len(self.header)
        marks = {"l": ":---", "r": "---:", "c": ":---:"}
        for row in self.rows:
            if len(row) != len(self.header):
                raise ValueError(f"a row of {len(row)} cells: {row}")
        return [
            _line(self.header),
            _line([marks[letter] for letter in align]),
            *(_line(row) for row in self.rows),
        ]


CODE = re.compile(r"(`[^`]*`)")


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(map(_cell, cells)) + " |"


def _cell(words: str) -> str:
    """Escape bars, except in code, where Markdown takes them as they are.

    A number and its unit stay on one line.
    """
    parts = CODE.split(str(words))
    return "".join(
        part if part.startswith("`") else UNIT.sub(NO_BREAK, part).replace("|", "\\|")
        for part in parts
    )
