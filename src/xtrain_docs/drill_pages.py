"""Drills in the page: their element, a file of data for each, and what Python reads.

    assets/drills/index.json     what is there: Python, the editor, the drills
    assets/drills/NAME.json      the texts to begin with, hints, the solution
    assets/drills/drills.zip     the checker, for the worker that runs the reader's file

The texts are those of `xtrain drill`; the archive has the files that the tests run.
"""

import ast
import html
import json
import re
from pathlib import Path
from typing import Any

from xtrain.cli.drill import hints
from xtrain.practice import LEVELS, Drill, drills, task
from xtrain.practice.page import IN_PAGE
from xtrain.practice.tasks import outline

from . import config, editor, pyodide

PACKED = (
    "xtrain/__init__.py",
    "xtrain/practice",
    "xtrain/whiteboard",
    "xtrain/copying",
    "xtrain/schedules",
    "xtrain/comm/waits.py",
    "xtrain/testing/errors.py",
)
"""Files and folders below src, which go with all that lies in them."""
RECORDED = "xtrain/practice/hang_lab"  # runs of real ranks, which a page cannot start
SUFFIXES = (".py", ".toml")
CHANGED = {
    "xtrain/comm/__init__.py": '"""In the browser: `waits` alone."""\n',
    "xtrain/practice/__init__.py": '"""In the browser: `page` and what it needs."""\n',
    "xtrain/testing/__init__.py": '"""In the browser: `errors` alone."""\n',
}
"""Packages whose own `__init__` would import torch or processes."""

LECTURES = {
    "lc1": "Communication", "lc2": "Data parallelism", "lc3": "ZeRO",
    "lc4": "Tensor parallelism", "lc5": "Pipeline parallelism",
    "lc6": "Context parallelism", "lc7": "Expert parallelism",
    "lc8": "All together",
}  # fmt: skip
WITHOUT_PYTHON = (
    "This copy of the site was built without Python for the browser: files can be "
    "written here, and checked with xtrain drill check."
)
NEEDS_SCRIPTS = (
    "Writing in the page needs scripts. On the command line: xtrain drill start NAME."
)
ASSETS = "../assets"


def in_page() -> list[Drill]:
    """The drills that the browser can check, in the order of the lectures."""
    return [one for one in drills().values() if one.name in IN_PAGE]


def data(one: Drill) -> dict[str, Any]:
    """All that the page shows of a drill."""
    said = told(one.solution)
    return {
        "name": one.name,
        "lecture": LECTURES[one.lecture],
        "minutes": one.minutes,
        "difficulty": one.difficulty,
        "computes": said.get("Computes", ""),
        "sends": said.get("Sends", ""),
        "leaves_out": said.get("Leaves out", ""),
        "called": outline(ast.parse(one.solution)).replace("# ", ""),
        "tasks": {level: task(one, level) for level in LEVELS},
        "solution": one.solution,
        "hints": hints(one),
    }


def told(text: str) -> dict[str, str]:
    """What a form's header tells, with the lines that go on."""
    words = ast.get_docstring(ast.parse(text)) or ""
    found = re.findall(r"^([A-Z][a-z ]+): +(.*(?:\n +.*)*)", words, re.MULTILINE)
    return {name: " ".join(rest.split()) for name, rest in found}


def index() -> dict[str, Any]:
    """What the page may offer."""
    names = [one.name for one in in_page()]
    python, ready = pyodide.is_ready(), editor.is_ready()
    return {"python": python, "editor": ready, "drills": names}


def files() -> list[Path]:
    """What goes into the archive."""
    found = {config.SOURCE / name for name in CHANGED}
    for name in PACKED:
        path = config.SOURCE / name
        found |= set(path.rglob("*")) if path.is_dir() else {path}
    found -= set((config.SOURCE / RECORDED).rglob("*"))
    return sorted(file for file in found if file.suffix in SUFFIXES)


def element() -> str:
    """The list of drills, which `drill.mjs` makes into a desk to write at.

    Its style sheet is asked for here: it is for pages with this element alone. (With
    `href` first, `publish` leaves it a file of its own.)
    """
    known = in_page()
    lectures = dict.fromkeys(one.lecture for one in known)
    groups = "".join(
        f'<section><h3 id="{lecture}">{LECTURES[lecture]}</h3><ul>'
        + "".join(item(one) for one in known if one.lecture == lecture)
        + "</ul></section>"
        for lecture in lectures
    )
    without = "" if pyodide.is_ready() else WITHOUT_PYTHON
    return (
        f'<div data-search-exclude><link href="{ASSETS}/drill.css" rel="stylesheet">'
        f"<xtrain-drill><noscript><p>{NEEDS_SCRIPTS}</p></noscript>"
        f'<p class="xt-status" role="status">{without}</p>'
        f'<div class="xt-drills">{groups}</div>'
        "</xtrain-drill></div>"
    )


def stars(one: Drill) -> str:
    """Its difficulty, of five."""
    return "★" * one.difficulty + "☆" * (5 - one.difficulty)


def item(one: Drill) -> str:
    """A drill of the list: its link, minutes, and how hard it is."""
    title = html.escape(one.solution.splitlines()[0].strip('"').rstrip("."))
    return (
        f'<li id="{one.name}"><a href="#{one.name}">{one.name.replace("_", "_<wbr>")}'
        f'</a><span class="xt-drill-about">{title}</span>'
        f'<span class="xt-drill-given">{one.minutes} min <span role="img" '
        f'aria-label="difficulty {one.difficulty} of 5">{stars(one)}</span></span>'
        '<span class="xt-drill-done"></span></li>'
    )


def write(site: Path) -> None:
    """Put data, archive, editor and Python into the built site."""
    target = site / "assets" / "drills"
    target.mkdir(parents=True, exist_ok=True)
    for one in in_page():
        (target / f"{one.name}.json").write_text(json.dumps(data(one)))
    (target / "index.json").write_text(json.dumps(index()))
    pyodide.pack_files(target / "drills.zip", files(), CHANGED)
    editor.write(site)
