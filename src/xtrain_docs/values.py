"""Numbers on pages: `{{ expression }}` is computed when the site is built.

An expression sees every public name of `xtrain.plan`, the names below, and the
filters of FILTERS (`{{ 64 * MiB | bytes }}`). An unknown name stops the build.

    ```rows for n in (2, 4, 8)
    | ranks | steps |
    | ---: | ---: |
    | {{ n }} | {{ 2 * (n - 1) }} |
    The caption.
    ```

is a table whose rows are computed for every n. `for` is Python's; it may go on over
lines before the table, and name what rows share: `for link in [LINKS["nvlink4"]]`.
"""

import ast
import html
import numbers
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

from xtrain import plan

from . import config, fences, lectures, races, verification
from .amounts import FILTERS, NO_BREAK, UNIT, GiB, KiB, MiB, number

VALUES: dict[str, Any] = {
    "KiB": KiB, "MiB": MiB, "GiB": GiB, "KB": 10**3, "MB": 10**6, "GB": 10**9,
    "us": 1e-6, "ms": 1e-3,
    "round": round, "min": min, "max": max, "sum": sum, "len": len, "abs": abs,
    "int": int, "float": float, "range": range,
    "enumerate": enumerate, "replace": replace,
}  # fmt: skip


class ValuesError(ValueError):
    """An expression on a page that cannot be computed. Stops the build."""


def value(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function that pages may call inside `{{ }}`."""
    VALUES[function.__name__] = function
    return function


def names() -> dict[str, Any]:
    """Every name an expression may use, whichever page is read first."""
    lectures.load()
    return VALUES | {name: getattr(plan, name) for name in plan.__all__}


def evaluate(expression: str, **bound: Any) -> str:
    """The text of one expression: Python, then filters after `|`.

    Args:
        bound: names of a row, beside those of every page.

    Raises:
        ValuesError: unknown name or filter, or the expression raised.
    """
    try:
        tree = ast.parse(expression.strip(), mode="eval").body
        result = _compute(tree, names() | bound)
    except Exception as problem:
        why = f"{type(problem).__name__}: {problem}"
        raise ValuesError(f"{{{{ {expression} }}}}: {why}") from problem
    if isinstance(result, bool) or not isinstance(result, str | numbers.Real):
        raise ValuesError(
            f"{{{{ {expression} }}}} is a {type(result).__name__}, not a number or text"
        )
    return result if isinstance(result, str) else number(result)


def _compute(tree: ast.expr, known: dict[str, Any]) -> Any:
    """Evaluate; `left | name(...)` calls a filter, as `|` binds loosest in Python."""
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.BitOr):
        call = tree.right if isinstance(tree.right, ast.Call) else None
        head = call.func if call else tree.right
        if not isinstance(head, ast.Name) or head.id not in FILTERS:
            raise ValuesError(
                f"no filter {ast.unparse(head)!r}; there are: {', '.join(FILTERS)}"
            )
        extra = [_compute(a, known) for a in call.args] if call else []
        named = {
            str(k.arg): _compute(k.value, known)
            for k in (call.keywords if call else [])
        }
        return FILTERS[head.id](_compute(tree.left, known), *extra, **named)
    code = compile(ast.Expression(tree), "<page>", "eval")
    return eval(code, {"__builtins__": {}, **known})  # our own pages


@value
def tests_total() -> int:
    """How many different tests pass on current sources, over all symbols."""
    summaries = verification.ledger().summaries()
    return len({test.id for summary in summaries for test in summary.good})


@value
def symbols_verified() -> int:
    """How many functions and classes have a passing test on their current source."""
    return sum(summary.verified for summary in verification.ledger().summaries())


WORDS_A_MINUTE = 200
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


@value
def reading_hours() -> int:
    """Of the pages of all lectures, without their code, at a calm pace."""
    pages = config.PAGES.glob("lc*/*.md")
    texts = (FENCED.sub("", page.read_text(encoding="utf-8")) for page in pages)
    return round(sum(len(text.split()) for text in texts) / WORDS_A_MINUTE / 60)


@value
def gpu_records() -> str:
    """The machines with GPUs of which there is a record."""
    abouts = verification.ledger().abouts
    found = {about["platform"] for about in abouts if about["device"] == "cuda"}
    return "; ".join(sorted(found)) or "none so far"


for race_value in races.VALUES:
    value(race_value)


EXPRESSION = re.compile(r"\{\{(?!\{)\s*(?P<expression>[^{}]+?)\s*\}\}")
CODE_SPAN = re.compile(r"(`+)(?!`).*?(?<!`)\1(?!`)")
LINK_TEXT = re.compile(r"\[(?:[^\[\]]|\[[^\[\]]*\])*\](?=[(\[])")


def filled(line: str, **bound: Any) -> str:
    """A line with its expressions computed, those in code spans as they are.

    A computed number can be focused, so that its tip is there for a finger and for the
    keyboard too; but not within a link, which takes the focus itself.
    """
    spans = [m.span() for m in CODE_SPAN.finditer(line)]
    links = [m.span() for m in LINK_TEXT.finditer(line)]

    def put(match: re.Match) -> str:
        if any(a <= match.start() < b for a, b in spans):
            return match.group(0)
        expression = match["expression"]
        text = evaluate(expression, **bound)
        before = line[: match.start()]
        plain = before.count("$") % 2 == 1 or line.lstrip().startswith(("#", "$$"))
        if plain or expression.strip() in bound:
            return text
        title = expression.replace("|", "as")
        used = [f"{n} = {v}" for n, v in bound.items() if re.search(rf"\b{n}\b", title)]
        where = f" for {', '.join(used)}" if used else ""
        title = html.escape(title + where, quote=True)
        for sign in "|`[]":  # Markdown would read a table, code, a link
            title = title.replace(sign, f"&#{ord(sign)};")
        linked = any(a <= match.start() < b for a, b in links)
        focus = "" if linked else 'tabindex="0" '
        return f'<span class="xt-value" {focus}title="computed: {title}">{text}</span>'

    return EXPRESSION.sub(put, line)


def rows(fence: fences.Fence) -> list[str] | None:
    """The lines of a `rows` fence as a table, and its caption."""
    if fence.language != "rows":
        return None
    marks = [line.startswith("|") for line in fence.body]
    first, last = marks.index(True), len(marks) - marks[::-1].index(True)
    clause = " ".join([fence.info.removeprefix("rows"), *fence.body[:first]])
    head, align, *shown = fence.body[first:last]
    lines = (filled(row, **one) for one in bindings(clause) for row in shown)
    body = [UNIT.sub(NO_BREAK, line) for line in lines]  # a number beside its unit
    caption = filled(" ".join(fence.body[last:]))
    below = [caption, "{ .xt-caption }", ""] if caption else []
    return ["", filled(head), align, *body, "", *below]


def bindings(clause: str) -> list[dict[str, Any]]:
    """`for a, b in ...`: the names and values of each turn."""
    try:
        tree: Any = ast.parse(f"[0 {clause}]", mode="eval").body
        targets = [n for one in tree.generators for n in ast.walk(one.target)]
        pairs = (f"{n.id!r}: {n.id}" for n in targets if isinstance(n, ast.Name))
        code = compile(f"[{{{', '.join(pairs)}}} {clause}]", "<page>", "eval")
        return eval(code, {"__builtins__": {}, **names()})  # our own pages
    except Exception as problem:
        raise ValuesError(f"rows {clause}: {problem!r}") from problem


class ValuesPreprocessor(Preprocessor):
    """Replaces expressions outside fences and code spans, and `rows` fences."""

    def run(self, lines: list[str]) -> list[str]:
        lines = fences.replace(lines, rows)
        fenced = {i for f in fences.fences(lines) for i in range(f.start, f.end + 1)}
        return [
            line if i in fenced or "{{" not in line else filled(line)
            for i, line in enumerate(lines)
        ]


CITED = r"\[(?P<text>[^\[\]]+)\]\{\s*\.(?P<kind>cited|given)\s*\}"


class CitedInline(InlineProcessor):
    """`[37 %]{.cited}`: from the source named beside it; `.given`: assumed."""

    def handleMatch(  # type: ignore[override]
        self, m: re.Match, data: str
    ) -> tuple[ET.Element, int, int]:
        """A span, by which guards tell it from a typed number."""
        del data
        span = ET.Element("span", {"class": f"xt-{m['kind']}"})
        span.text = m["text"]
        return span, m.start(0), m.end(0)
