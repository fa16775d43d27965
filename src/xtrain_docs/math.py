"""TeX to MathML at build time, no script in the reader's way.

`$x$` in a line, `$$` on lines of their own (or around one line) for a display.
A command that the converter does not know, or a missing argument, stops the build.
"""

import html
import re
import xml.etree.ElementTree as ET
from functools import lru_cache

from latex2mathml.converter import convert
from markdown.inlinepatterns import InlineProcessor
from markdown.preprocessors import Preprocessor

from . import fences

ARGUMENTS = {
    "mfrac": 2, "msub": 2, "msup": 2, "msubsup": 3, "munder": 2, "mover": 2,
    "munderover": 3, "mroot": 2,
}  # fmt: skip
NAMESPACE = "{http://www.w3.org/1998/Math/MathML}"
INLINE = r"(?<![\\$])\$(?![\s$])((?:\\.|[^$\\\n])+?)(?<!\s)\$(?![\d$])"


class MathError(ValueError):
    """TeX that cannot be set. Stops the build."""


@lru_cache(maxsize=4096)
def mathml(tex: str, display: bool = False) -> str:
    """MathML for TeX, checked.

    Raises:
        MathError: unknown command, unbalanced braces, or a missing argument.
    """
    tex = tex.strip()
    bare = re.sub(r"\\.", "", tex)
    if bare.count("{") != bare.count("}"):
        raise MathError(f"unbalanced braces in ${tex}$")
    try:
        text = convert(tex, display="block" if display else "inline")
    except Exception as problem:
        raise MathError(f"bad TeX ${tex}$: {type(problem).__name__}") from problem
    root = ET.fromstring(text)
    for node in root.iter():
        name = node.tag.removeprefix(NAMESPACE)
        if (node.text or "").lstrip().startswith("\\"):
            raise MathError(f"unknown command {node.text} in ${tex}$")
        if name in ARGUMENTS and len(node) != ARGUMENTS[name]:
            raise MathError(f"a missing argument in ${tex}$")
    _tidy(root)
    ET.register_namespace("", NAMESPACE[1:-1])
    root.set("alttext", tex)
    out = ET.tostring(root, encoding="unicode")
    return out


def _tidy(root: ET.Element) -> None:
    """Upright words as one identifier; fences as operators that stretch."""
    for parent in root.iter():
        for index, node in enumerate(list(parent)):
            name = node.tag.removeprefix(NAMESPACE)
            if name == "mi" and (node.text or "") in "⌈⌉⌊⌋":
                node.tag = NAMESPACE + "mo"
                node.set("stretchy", "false")
            letters = [c.text or "" for c in node]
            upright = (
                name == "mrow"
                and len(node) > 1
                and all(
                    c.tag == NAMESPACE + "mi" and c.get("mathvariant") == "normal"
                    for c in node
                )
            )
            if upright:
                word = ET.Element(NAMESPACE + "mi")
                word.text = "".join(letters)
                word.tail = node.tail
                parent[index] = word


class InlineMath(InlineProcessor):
    """`$...$` within a line."""

    def handleMatch(self, m: re.Match, data: str) -> tuple[str, int, int]:  # type: ignore[override]
        """Store the MathML where no later pattern touches it."""
        del data
        tex = html.unescape(m.group(1))
        return self.md.htmlStash.store(mathml(tex)), m.start(0), m.end(0)


class DisplayMath(Preprocessor):
    """`$$` ... `$$`, on one line or several, outside fences."""

    def run(self, lines: list[str]) -> list[str]:
        fenced = {i for f in fences.fences(lines) for i in range(f.start, f.end + 1)}
        out: list[str] = []
        at = 0
        while at < len(lines):
            line = lines[at]
            if at in fenced or not line.strip().startswith("$$"):
                out.append(line)
                at += 1
                continue
            indent = line[: len(line) - len(line.lstrip())]
            block, at = self._collect(lines, at)
            math = mathml(block, display=True)
            holder = f'<div class="xt-math" tabindex="0">{math}</div>'
            out += ["", indent + self.md.htmlStash.store(holder), ""]
        return out

    def _collect(self, lines: list[str], at: int) -> tuple[str, int]:
        first = lines[at].strip().removeprefix("$$")
        if first.rstrip().endswith("$$"):
            return first.rstrip().removesuffix("$$"), at + 1
        block = [first]
        for i in range(at + 1, len(lines)):
            text = lines[i].strip()
            if text.endswith("$$"):
                return "\n".join([*block, text.removesuffix("$$")]), i + 1
            block.append(text)
        raise MathError(f"a $$ that is never closed: {lines[at].strip()}")
