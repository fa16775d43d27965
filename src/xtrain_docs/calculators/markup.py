"""Pieces of HTML that answers are made of.

Standard library only: the browser's Python runs this file.
"""

import html
from collections.abc import Iterable, Sequence


def html_table(
    caption: str, header: Sequence[str], rows: Iterable[Sequence[str]]
) -> str:
    """A table whose first column names its rows."""
    head = "".join(f'<th scope="col">{html.escape(cell)}</th>' for cell in header)
    body = "".join(
        f'<tr><th scope="row">{html.escape(first)}</th>'
        + "".join(f"<td>{html.escape(cell)}</td>" for cell in others)
        + "</tr>"
        for first, *others in rows
    )
    title = f"<caption><span>{html.escape(caption)}</span></caption>"
    return (
        f'<table class="xt-numbers">{title}'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    )
