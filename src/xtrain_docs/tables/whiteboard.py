"""The whiteboard forms: what each sends and leaves out, where it is, its download."""

import re
from pathlib import Path

from xtrain.copying import whiteboard
from xtrain.copying.forms import forms, lines_of_code
from xtrain.practice.drills import drill
from xtrain.practice.page import IN_PAGE

from .. import authored, config
from ..downloads import data_url
from ..drill_pages import stars, told
from . import REGISTRY, Table

OVERVIEW = "whiteboard.md"
"""The page that has these tables; a form is shown whole on another one."""


HEADER = ("form", "minutes", "difficulty", "lines of code", "what it sends",
          "what it leaves out")  # fmt: skip
HEADING = re.compile(r"^#+ .*\{#([\w.-]+)\}$")


def shown_on(file: Path) -> str | None:
    """The section, below docs/en, that shows the form of this file whole."""
    reference = file.relative_to(config.SOURCE.parent).as_posix()
    for page in authored.references().get(reference, []):
        name = page.relative_to(config.PAGES).as_posix()
        if name not in (OVERVIEW, "index.md"):
            return name + anchor_above(page.read_text(encoding="utf-8"), reference)
    return None


def anchor_above(text: str, reference: str) -> str:
    """ "#anchor" of the last heading before a file is embedded; "" if it has none."""
    before = text.partition(f'--8<-- "{reference}"')[0]
    found = [match[1] for line in before.splitlines() if (match := HEADING.match(line))]
    return f"#{found[-1]}" if found else ""


def all_forms() -> dict[str, Path]:
    return forms(config.SOURCE / "xtrain")


@REGISTRY
def whiteboard_forms(folder: str) -> Table:
    """The forms of one folder, by the headers of their files and as drills."""
    rows = []
    for name, file in all_forms().items():
        if file.parent.name == folder:
            text = file.read_text(encoding="utf-8")
            said, lines = told(text), lines_of_code(text)
            link, one = f"[`{name}`](#{name})", drill(name)
            rows.append((link, str(one.minutes), stars(one), str(lines),
                         said["Sends"], said["Leaves out"]))  # fmt: skip
    return Table(HEADER, rows, "lrcrll")


@REGISTRY
def whiteboard_links(name: str) -> list[str]:
    """One line: where a form is shown whole, and its download; ValueError if none."""
    link = data_url(whiteboard(name, config.SOURCE / "xtrain"))
    download = f'[download {name}.py]({link}){{ .xt-download download="{name}.py" }}'
    page = shown_on(all_forms()[name])
    code = [f"[the code]({page})"] if page else []
    write = [f"[write it in the page](practise.md#{name})"] if name in IN_PAGE else []
    return [" · ".join([*code, *write, download])]
