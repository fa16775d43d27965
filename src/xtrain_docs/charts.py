"""Line charts of formulas, declared on the page.

    ```chart for p in [2**i for i in range(2, 13)]
    title: Above the line the ring is faster, below it the tree
    x: p, Axis("ranks", "log2")
    y: Axis("tensor", "log2", as_bytes)
    1 us: crossover("tree_all_reduce", "ring_all_reduce", p, 1e-6, 1 / 50e9)
    5 us: crossover("tree_all_reduce", "ring_all_reduce", p, 5e-6, 1 / 50e9)

    The caption, as Markdown.
    ```

Every line but the named ones is a series: its name, then its value at one turn of
`for`, which is Python's and may have several clauses, as in `rows` (`values`); None
leaves the point out. Expressions see what those of a page see, `Axis`, and the filters
as `as_bytes`, `as_seconds("2")`, ... `note:` is the description for screen readers;
`mark:` draws a vertical line at a value of x: `mark: 4 * KiB, "equal"`. An indented
line goes on with the line above.
"""

from typing import Any

from . import fences, values
from .amounts import FILTERS
from .svg import Axis, line_chart

NAMED = ("title", "note", "x", "y", "mark")
TOOLS = {"Axis": Axis, **{f"as_{name}": do for name, do in FILTERS.items()}}


def split(body: list[str]) -> tuple[list[tuple[str, str]], str]:
    """The declared lines as (name, what follows), and the caption."""
    declared, _, caption = "\n".join(body).partition("\n\n")
    joined = declared.replace("\n ", " ").splitlines()
    pairs = (line.partition(": ") for line in joined)
    return [(name, rest.strip()) for name, _, rest in pairs], " ".join(caption.split())


def chart(fence: fences.Fence) -> tuple[str, str]:
    """The drawing of a `chart` fence, and its caption.

    Raises:
        ValuesError: an expression cannot be computed, or x, y or the title is missing.
    """
    lines, caption = split(fence.body)
    told = dict(lines)
    if missing := [name for name in ("title", "x", "y") if name not in told]:
        raise values.ValuesError(f"a chart without {', '.join(missing)}: {lines}")
    turns = values.bindings(fence.info.removeprefix("chart"))
    known = {"__builtins__": {}, **values.names(), **TOOLS}
    points: dict[str, list[tuple[float, float]]] = {}
    for turn in turns:
        at = compute(told["x"], known | turn)[0]
        for name, expression in lines:
            if name not in NAMED:
                here = compute(expression, known | turn)
                if here is not None:
                    points.setdefault(name, []).append((at, here))
    marks = [compute(told["mark"], known)] if "mark" in told else []
    drawing = line_chart(
        points,
        compute(told["x"], known | turns[0])[1],
        compute(told["y"], known),
        words(told["title"]),
        words(told.get("note", "")),
        marks,
    )
    return drawing, caption


def words(text: str) -> str:
    """A line with its `{{ }}` computed, without the tips they have on a page."""
    return values.EXPRESSION.sub(lambda m: values.evaluate(m["expression"]), text)


def compute(expression: str, known: dict[str, Any]) -> Any:
    """The value of an expression; ValuesError if there is none."""
    try:
        return eval(expression, known)  # our own pages
    except Exception as problem:
        raise values.ValuesError(f"chart, {expression}: {problem!r}") from problem
