"""Make a built site quick to load: few files, named by what is in them.

- The style sheets of a page become one file, without chains of imports.
- Our scripts and that style sheet carry a digest in their names, so that a browser may
  keep them for good: a changed file has another name.
- The fonts that a page shows are asked for at once, not when the styles have been read.
- Each block of code says how many lines it has, so that a browser lays it out only when
  it comes near the screen; long ones are folded (`folds`).
- A style that a page brings several times is in it once, and so is our mark.
- Files to download are files, not base64 in each page that offers them.
- The search has a worker of our own (`search`).
- What no page asks for goes (source maps, search in other languages, the styles of a
  notebook's widgets), and so do blank space of templates and marks without a colour.
"""

import base64
import os
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from posixpath import dirname, join, normpath, relpath

from . import folds
from .generated import digest
from .search.worker import NAMED, join_worker

IMPORT = re.compile(r"""@import\s+url\(["']?(?P<path>[^"')]+)["']?\)\s*;""")
ADDRESS = re.compile(
    r"""url\((?P<quote>["']?)(?P<path>(?!data:|#|https?:|/)[^"')]+)\1\)"""
)
STYLES = re.compile(r'[ \t]*<link rel="stylesheet" href="(?P<href>[^":]+)">\n?')
SCRIPT = re.compile(r'(?P<start><script [^>]*src="[^":]*assets/)xtrain\.js"')
FONT = re.compile(
    r'@font-face{font-family:"(?P<family>[^"]+)";font-style:(?P<style>\w+)[^}]*'
    r'url\("(?P<path>[^"]+\.woff2)"\)'
)
COMMENT = re.compile(r"/\*.*?\*/\s*", re.DOTALL)
INLINE = re.compile(r"<style[^>]*>(.*?)</style>", re.DOTALL)
LONG = 50_000
"""Inline styles above are those of notebooks: half a megabyte, the same in each."""
RULE = re.compile(r"(?<![^{}])(?P<selectors>[^{}]*)\{[^{}]*\}")
WIDGET = re.compile(r"\.(?:bp3|lm|CodeMirror|cm)-")
"""Menus and editors of a running notebook: two thirds of its styles."""
MARK = re.compile(r'(<svg[^>]* class="xt-mark-svg"[^>]*>)(.*?)(</svg>)', re.DOTALL)
INDENT = re.compile(r"\n\s+")
KEPT = re.compile(r"(<(?:pre|textarea)\b.*?</(?:pre|textarea)>)", re.DOTALL)
PLAIN = re.compile(r'<span class="[nw]">([^<]*)</span>')
"""What the highlighter marks and no style colours: plain names and spaces."""
DATA = re.compile(
    r'href="data:(?:text/x-|application/)(?P<kind>python|json);base64,(?P<data>[^"]+)"'
)
TIPS = re.compile(
    r'(?P<before><a (?:href="[^"]*" )?class=")(?P<class>headerlink|autorefs)'
    r'(?P<rest>[^>]*?) title="[^"]*"'
)
"""Tips that say nothing new: the theme would set up each of them as a page loads."""
PATH = re.compile(r'(?<=class="xt-path">)[^<]+(?=</code>|</a>)')
"""A path above a block of code: it may break where a folder or a word ends."""
MAPPED = re.compile(r"\n(?://|/\*)# sourceMappingURL=\S+(?: ?\*/)?\s*$")

SHOWS: dict[tuple[str, str], Callable[[str], bool]] = {
    ("xt-text", "normal"): lambda page: True,
    ("xt-display", "normal"): lambda page: True,
    ("xt-text", "italic"): lambda page: "<em>" in page,
    ("xt-code", "normal"): lambda page: "<code" in page,
    ("xt-math", "normal"): lambda page: "<math" in page,
}
"""Does a page show this font? Asked of the HTML of its article."""


Fonts = dict[tuple[str, str], str]


class PublishError(ValueError):
    """A page names a style sheet or script that was not built. Stops the build."""


def publish(site: Path) -> None:
    """Do all of it to the freshly built pages in `site`."""
    styles = _Styles(site)
    script = _named_by_content(site / "assets" / "xtrain.js")
    worker = join_worker(site)
    for page in sorted(site.rglob("*.html")):
        text = styles.join(page, page.read_text())
        if worker:
            text = NAMED.sub(worker, text)
        if script:
            text = SCRIPT.sub(rf'\g<start>{script}"', text)
        text = TIPS.sub(_without_tip, _mark_once(_styles_once(text)))
        text = DATA.sub(partial(_as_file, page, site), text)
        text = PATH.sub(lambda path: re.sub(r"(?<=[/_])", "<wbr>", path[0]), text)
        text = folds.with_lines(text, fold="xt-home" not in text)
        page.write_text(_without_blanks(PLAIN.sub(r"\1", text)))
    styles.remove_parts()
    remove_unused(site)


def _without_blanks(page: str) -> str:
    """A page less the blank space that templates leave, but in its code."""
    parts = KEPT.split(page)
    return "".join(
        part if i % 2 else INDENT.sub("\n", part) for i, part in enumerate(parts)
    )


def remove_unused(site: Path) -> None:
    """Remove what the theme brings and no page asks for."""
    shutil.rmtree(site / "assets/javascripts/lunr", ignore_errors=True)
    for path in sorted((site / "assets").rglob("*.map")):
        mapped = path.with_suffix("")
        path.unlink()
        if mapped.is_file():
            mapped.write_text(MAPPED.sub("\n", mapped.read_text()))


def _without_tip(link: re.Match[str]) -> str:
    """A link without its tip; what has no words of its own keeps a name."""
    name = ' aria-label="Link to this section"' if link["class"] == "headerlink" else ""
    return f"{link['before']}{link['class']}{link['rest']}{name}"


def _mark_once(page: str) -> str:
    """A page that draws our mark once, and shows this drawing wherever it stands."""
    first: list[str] = []

    def keep(mark: re.Match[str]) -> str:
        begin, drawing, end = mark.groups()
        if not first:
            first.append(drawing)
            return f'{begin}<g id="xt-mark">{drawing}</g>{end}'
        return f'{begin}<use href="#xt-mark"/>{end}' if drawing in first else mark[0]

    return MARK.sub(keep, page)


def _without_widgets(style: str) -> str:
    """A notebook's style less the rules that only widgets have a use for."""

    def keep(rule: re.Match[str]) -> str:
        selectors = rule["selectors"].split(",")
        return "" if all(WIDGET.search(one) for one in selectors) else rule[0]

    return RULE.sub(keep, style)


def _styles_once(page: str) -> str:
    """A page in which no `<style>` stands twice: each is read again for every copy."""
    seen: set[str] = set()

    def keep(style: re.Match[str]) -> str:
        known = style[0] in seen
        seen.add(style[0])
        return "" if known else style[0]

    return INLINE.sub(keep, page)


def _as_file(page: Path, site: Path, link: re.Match[str]) -> str:
    """The address of a file, seen from the page, in place of what is in it."""
    content = base64.b64decode(link["data"])
    suffix = {"python": "py", "json": "json"}[link["kind"]]
    file = site / "assets" / "files" / f"{digest(content)}.{suffix}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return f'href="{relpath(file, page.parent)}"'


class _Styles:
    """Joins style sheets: each set of them that some page uses, once."""

    def __init__(self, site: Path) -> None:
        self.site = site
        self.joined: dict[tuple[str, ...], tuple[str, Fonts]] = {}

    def join(self, page: Path, text: str) -> str:
        """The page with one style sheet for several, and its fonts preloaded."""
        hrefs = [match["href"] for match in STYLES.finditer(text)]
        if not hrefs:
            return text
        inline: list[str] = []

        def share(match: re.Match) -> str:
            if len(match[1]) < LONG:
                return match[0]
            inline.append(self._inline(match[1]))
            return ""

        text = INLINE.sub(share, text)
        base = "" if hrefs[0].startswith("/") else self._place(page.parent)
        files = (*(self._file(base, href) for href in hrefs), *inline)
        # A page may be anywhere below the root (404.html): the prefix of the first
        # sheet is that of the others.
        root = hrefs[0].removesuffix(files[0])
        if files not in self.joined:
            self.joined[files] = self._write(files)
        name, fonts = self.joined[files]
        article = text[text.find("<article") :]
        links = [
            f'<link rel="preload" href="{root}{path}" as="font" type="font/woff2" '
            "crossorigin>\n"
            for face, path in fonts.items()
            if face in SHOWS and SHOWS[face](article)
        ]
        links.append(f'<link rel="stylesheet" href="{root}{name}">\n')
        first = True

        def put(match: re.Match) -> str:
            nonlocal first
            words, first = ("".join(links) if first else ""), False
            return words

        return STYLES.sub(put, text)

    def _inline(self, style: str) -> str:
        """A long style of a page as a sheet, so that pages share it."""
        style = _without_widgets(style)
        name = f"assets/inline.{digest(style.encode())}.css"
        (self.site / name).write_text(style)
        return name

    def remove_parts(self) -> None:
        """Remove the sheets that have been joined, on every page or on none."""
        for files in self.joined:
            for file in files:
                (self.site / file).unlink(missing_ok=True)

    def _place(self, folder: Path) -> str:
        return folder.relative_to(self.site).as_posix()

    def _file(self, base: str, href: str) -> str:
        """The path of a sheet below the site."""
        path = normpath(join(base, href))
        if href.startswith("/"):  # /en/assets/x.css: the site is below the host's root
            parts = href.strip("/").split("/")
            tails = ("/".join(parts[i:]) for i in range(len(parts)))
            path = next((t for t in tails if (self.site / t).is_file()), href)
        if not (self.site / path).is_file():
            raise PublishError(
                f"a page names the style sheet {href}, which is not there"
            )
        return path

    def _write(self, files: tuple[str, ...]) -> tuple[str, Fonts]:
        folder = "assets"
        text = "\n".join(self._sheet(file, folder) for file in files)
        fonts = {  # of several faces with one name, the last one goes before the others
            (found["family"], found["style"]): normpath(join(folder, found["path"]))
            for found in FONT.finditer(text)
        }
        name = f"{folder}/site.{digest(text.encode())}.css"
        (self.site / folder).mkdir(parents=True, exist_ok=True)
        (self.site / name).write_text(text)
        return name, fonts

    def _sheet(self, file: str, folder: str) -> str:
        """A sheet with what it imports, and its addresses as seen from `folder`."""
        text = COMMENT.sub("", (self.site / file).read_text())
        here = dirname(file)

        def move(match: re.Match) -> str:
            path = relpath(normpath(join(here, match["path"])), folder)
            return f"url({match['quote']}{path}{match['quote']})"

        def take(match: re.Match) -> str:
            return self._sheet(normpath(join(here, match["path"])), folder)

        imports = [take(match) for match in IMPORT.finditer(text)]
        return "\n".join([*imports, ADDRESS.sub(move, IMPORT.sub("", text))])


def _named_by_content(path: Path) -> str | None:
    """Give a file its digest as part of its name; returns the name."""
    if not path.is_file():
        return None
    name = f"{path.stem}.{digest(path.read_bytes())}{path.suffix}"
    os.replace(path, path.with_name(name))
    return name
