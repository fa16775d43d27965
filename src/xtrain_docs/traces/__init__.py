"""Traces that pages animate: what a collective really sent, step by step.

    @REGISTRY
    def ring_all_reduce(ranks: int = 4) -> Trace:
        return recorded("a ring all-reduce", "xtrain.comm.ring:ring_all_reduce",
                        "all_reduce", ranks)

A page then says ```` ```trace ring_all_reduce ranks=4 ````. The function runs on real
ranks with inputs from which every message can be read back: which cells it carried
and whose contributions they held. The steps, the contents and the final state are
checked against each other, so a picture cannot show what did not happen.
"""

import html
import json
import re
from dataclasses import dataclass
from typing import Any

from .. import runs
from ..blocks import Registry
from .record import ADDITIVE, on_rank, replayed

REGISTRY = Registry("trace")


@dataclass(frozen=True)
class Trace:
    """A recorded run, as the page's element reads it.

    Attributes:
        data: title, kind, ranks, cells, additive, initial and steps; a step is its
            messages (src, dst, cells, content, op) and the state after it. The title
            is a noun with its article, such as "a ring all-reduce".
    """

    data: dict[str, Any]
    autoplay: bool = False

    def __post_init__(self) -> None:
        if re.search(r"\w_\w", self.data["title"]):
            raise ValueError(
                f"a trace is called {self.data['title']!r}: readers see this, so it "
                "has to be words and no name of a function"
            )

    def caption(self, words: str) -> str:
        """The author's caption, or one made from the run."""
        if words:
            return words
        data = self.data
        title = data["title"]
        return (
            f"{title[:1].upper()}{title[1:]} on {data['ranks']} ranks, recorded from "
            f"a real run: {len(data['steps'])} steps."
        )

    def html(self) -> str:
        """The element, with the table of messages for readers without scripts."""
        packed = html.escape(json.dumps(self.data, separators=(",", ":")), quote=True)
        rows = "".join(
            f"<tr><td>{number}</td><td>{m['src']}</td><td>{m['dst']}</td>"
            f"<td>{_cells(m['cells'], self.data['cells'])}</td>"
            f"<td>{_does(m)}</td></tr>"
            for number, step in enumerate(self.data["steps"], start=1)
            for m in step["messages"]
        )
        head = "".join(
            f'<th scope="col">{h}</th>'
            for h in ("Step", "From rank", "To rank", "Cells", "There they")
        )
        name = f"Messages of {self.data['title']}, {self.data['ranks']} ranks"
        play = ' data-autoplay="true"' if self.autoplay else ""
        return (
            f'<div class="xt-tracebox" data-search-exclude>'
            f'<xt-trace data-ranks="{self.data["ranks"]}" data-trace="{packed}"{play}>'
            f'<div class="xt-trace-table"><table><caption>{html.escape(name)}</caption>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>"
            "</xt-trace></div>"
        )


def _cells(cells: list[int], total: int) -> str:
    if len(cells) == total:
        return "all" if total > 1 else "the whole tensor" if total else "none"
    return ", ".join(map(str, cells)) or "none"


def _does(message: dict[str, Any]) -> str:
    return {"add": "are added", "copy": "are stored", "signal": "tell it to go on"}[
        message["op"]
    ]


def recorded(
    title: str,
    reference: str,
    kind: str,
    ranks: int,
    cells: int | None = None,
    root: int = 0,
    autoplay: bool = False,
    **extra: Any,
) -> Trace:
    """The trace of one function, recorded now or read back if nothing changed.

    Args:
        title: what readers see, such as "a ring all-reduce".
        reference: `module:function`.
        kind: how it is called; see `xtrain.comm.collective_kinds`.
        cells: how many each rank has; as many as ranks when None.
        extra: keyword arguments of the function.
    """
    cells = 0 if kind == "barrier" else cells or ranks
    arguments = (ranks, reference, kind, cells, root, extra)
    module = reference.partition(":")[0]
    seen = runs.remembered(on_rank, *arguments, also=[module])
    told = {"title": title, "kind": kind, "ranks": ranks, "cells": cells, "root": root}
    told["additive"] = kind in ADDITIVE
    return Trace({**told, **replayed(kind, ranks, cells, seen)}, autoplay)
