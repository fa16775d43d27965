"""Figures, tables and traces, drawn by code at build time.

    ```figure wait_circle ranks=8
    The caption, as Markdown; `{{ }}` in it is computed as elsewhere.
    ```

calls the function registered as `wait_circle` by some lecture's file (likewise
`table` and `trace`), with the options as keyword arguments; `calculator` shows one of
`calculators.answers`; a `chart` draws formulas that stand in it (`charts`). An unknown
name or option stops the build.
"""

import ast
import html
import importlib
import inspect
import pkgutil
import re
import shlex
from collections.abc import Callable
from functools import cache
from typing import Any

from markdown.preprocessors import Preprocessor

from . import charts, config, fences, lectures, values

TIMELINE = re.compile(
    r'<svg [^>]*class="xs"[^>]* width="(?P<width>\d+)" height="(?P<height>\d+)"'
    r".*?</svg>",
    re.DOTALL,
)
SHRINKS = re.compile(
    r'(<svg [^>]*class="xc"[^>]*viewBox="0 0 (?P<width>\d+)[^>]*style=")min-width:0'
)
"""Drawings of `xtrain cluster`, with letters of 11 px, which are to have 10."""
RAW = ("<!-- xtrain raw html -->", "<!-- end of xtrain raw html -->")
ANCHORS = "<!-- xtrain anchors -->"
KINDS = ("figure", "table", "trace", "calculator")


class BlockError(ValueError):
    """A page asks for a picture or table that cannot be made. Stops the build."""


class Registry(dict[str, Callable[..., Any]]):
    """Functions that pages call by name; used as a decorator."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def __call__(self, function: Callable[..., Any]) -> Callable[..., Any]:
        name = function.__name__
        if name in self and self[name].__module__ != function.__module__:
            raise BlockError(f"two {self.kind}s are called {name!r}")
        self[name] = function
        return function

    def run(self, name: str, options: dict[str, Any]) -> Any:
        """Call the registered function; BlockError names what exists instead."""
        if name not in self:
            raise BlockError(
                f"no {self.kind} {name!r}; there are: {', '.join(sorted(self))}"
            )
        function = self[name]
        try:
            inspect.signature(function).bind(**options)
        except TypeError as problem:
            raise BlockError(
                f"{self.kind} {name}{inspect.signature(function)}: {problem}"
            ) from problem
        return function(**options)


def parse_info(info: str) -> tuple[str, str, dict[str, Any]] | None:
    """`figure wait_circle ranks=8` -> kind, name and options; None if no such fence."""
    words = shlex.split(info) if info.split(" ")[0] in KINDS else []
    if not words:
        return None
    kind, *rest = words
    if not rest:
        raise BlockError(f"```{kind} needs the name of a {kind}")
    options: dict[str, Any] = {}
    for word in rest[1:]:
        key, equals, text = word.partition("=")
        if not equals:
            raise BlockError(f"```{info}: {word!r} is not of the form key=value")
        try:
            options[key] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            options[key] = text
    return kind, rest[0], options


@cache
def registry(kind: str) -> Registry:
    """The registry of a kind, with every module loaded that may add to it."""
    package = importlib.import_module(f"xtrain_docs.{kind}s")
    for module in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{package.__name__}.{module.name}")
    lectures.load()
    return package.REGISTRY


class BlocksPreprocessor(Preprocessor):
    """Replaces figure, table and trace fences by what their function makes."""

    def run(self, lines: list[str]) -> list[str]:
        return fences.replace(lines, self._block)

    def _block(self, fence: fences.Fence) -> list[str] | None:
        try:
            if fence.language == "chart":
                drawing, caption = charts.chart(fence)
                return self._figure(
                    drawing, values.filled(caption), "xt-fig xt-fig-chart"
                )
            found = parse_info(fence.info)
            return self._draw(fence, *found) if found else None
        except Exception as problem:
            return config.draft_note(problem)

    def _draw(
        self, fence: fences.Fence, kind: str, name: str, options: dict[str, Any]
    ) -> list[str]:
        if kind == "calculator":
            package = f"{__package__}.calculators.element"  # only pages that have one
            made: Any = importlib.import_module(package).element(name, **options)
        else:
            made = registry(kind).run(name, options)
        caption = " ".join(line.strip() for line in fence.body if line.strip())
        caption = values.filled(caption)
        if kind == "table":
            rows = made if isinstance(made, list) else made.markdown()
            return ["", *rows, "", *_caption(caption, "xt-caption"), ""]
        if kind == "trace":
            return self._figure(made.html(), made.caption(caption), "xt-tracefig")
        if kind == "calculator":
            return self._figure(made, caption, "xt-calculator")
        return self._figure(made, caption, f"xt-fig xt-fig-{name.replace('_', '-')}")

    def _figure(self, inner: str, caption: str, classes: str) -> list[str]:
        inner = re.sub(r"\s*\n\s*", " ", inner)
        inner = TIMELINE.sub(  # laid out when it comes near
            r'<div class="xt-part" style="--xt-width: \g<width>px; '
            r'--xt-height: \g<height>px">\g<0></div>',
            inner,
        )
        inner = SHRINKS.sub(
            lambda svg: f"{svg[1]}min-width:{round(int(svg['width']) / 1.1)}px", inner
        )
        figure = f'<div class="xt-scroll" tabindex="0">{inner}</div>'
        if classes in ("xt-tracefig", "xt-calculator"):
            figure = inner
        opened = f'<figure class="{html.escape(classes)}" markdown="1">'
        lines = ["", opened, "", self.md.htmlStash.store(figure), ""]
        if caption:
            lines += [
                '<figcaption markdown="span">' + caption + "</figcaption>",
                "",
            ]
        return [*lines, "</figure>", ""]


class RawPreprocessor(Preprocessor):
    """Stores HTML between the RAW marks as it is: nothing parses it, so it is fast.

    What is left behind until the other half has run is a line with the anchors, because
    MkDocs looks for those in the text (at 21).
    """

    def run(self, lines: list[str]) -> list[str]:
        while RAW[0] in lines:
            start, end = lines.index(RAW[0]), lines.index(RAW[1])
            text = "\n".join(lines[start + 1 : end])
            names = re.findall(r'<[^>]* id="([^"]+)"', text)
            anchors = ANCHORS + "".join(f'<i id="{name}">' for name in names)
            stored = self.md.htmlStash.store(text)
            lines = [*lines[:start], anchors, "", stored, "", *lines[end + 1 :]]
        return lines


class AnchorsPreprocessor(Preprocessor):
    """Takes the line with the anchors away again, before raw HTML is read (20)."""

    def run(self, lines: list[str]) -> list[str]:
        return [line for line in lines if not line.startswith(ANCHORS)]


def _caption(text: str, name: str) -> list[str]:
    return [text, f"{{ .{name} }}"] if text else []
