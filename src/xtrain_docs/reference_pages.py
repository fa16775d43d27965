"""A page for each room of xtrain, from its docstrings: docs/en/reference/*.md."""

import ast
import re

from xtrain.evidence.source import module_name

from . import authored, config, symbols
from .blocks import RAW
from .evidence_links import closed_block
from .generated import head, prune, write


def modules() -> list[str]:
    """Every public module of xtrain that defines something public."""
    found = []
    for path in sorted((config.SOURCE / "xtrain").rglob("*.py")):
        module = module_name(path, config.SOURCE)
        hidden = re.search(r"\b_|\.(self_checks|stand_in)\b", module)
        if not hidden and (path.parent / "__init__.py").is_file():
            package = path.name == "__init__.py"
            body = ast.parse(path.read_text()).body
            if any(is_public(node, package) for node in body):
                found.append(module)
    return found


def is_public(node: ast.stmt, package: bool) -> bool:
    """A function, a class, or a constant of a file that is not a package's."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return not node.name.startswith("_")
    return isinstance(node, ast.Assign | ast.AnnAssign) and not package


def _summary(module: str) -> str:
    text = symbols.module_path(module, config.SOURCE).read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    return doc.split("\n\n")[0].replace("\n", " ").strip()


def rooms() -> dict[str, list[str]]:
    """The public modules by room: a folder of src/xtrain, or `xtrain` for its files."""
    found: dict[str, list[str]] = {}
    for module in modules():
        parts = module.split(".")
        is_room = len(parts) > 1 and (config.SOURCE / "xtrain" / parts[1]).is_dir()
        found.setdefault(parts[1] if is_room else "xtrain", []).append(module)
    return found


def write_reference() -> int:
    """docs/en/reference/<room>.md; returns how many."""
    folder = config.PAGES / "reference"
    index = head("Reference", "Every public name of xtrain, room by room.")
    index += ["Every public name, from the docstrings, with its code.", ""]
    kept = {folder / "index.md"}
    for room, members in rooms().items():
        kept.add(write(folder / f"{room}.md", _room_page(room, members)))
        index += [f"## [`{_title(room)}`]({room}.md)", ""]
        index += [f"- [`{m}`]({room}.md#{m}): {_summary(m)}" for m in members]
        index.append("")
    write(folder / "index.md", "\n".join(index))
    prune(folder, kept)
    return len(kept)


def _title(room: str) -> str:
    return room if room == "xtrain" else f"xtrain.{room}"


def _room_page(room: str, members: list[str]) -> str:
    title, taught, inner = _title(room), taught_in(), room in MACHINERY | SHOWN
    bare = inner or room in TOOLS
    code = "" if bare else ", with its code"
    about = f"Reference of {title}, from its docstrings{code}."
    lines = head(title, about, searched=not inner)
    for module in members:
        lines += [
            f"## `{module}` {{ #{module} }}",
            "",
            *([] if bare else [RAW[0], *_file(module).split("\n"), RAW[1]]),
            "",
            *taught.get(module, []),
            f"::: {module}",
            "    options: {heading_level: 3}",
            "",
        ]
    return "\n".join(lines)


MACHINERY = {"bench", "copying", "evidence", "practice"}
"""Rooms that race, copy, record and check what the others do: without the text of their
files, and not in the search."""
SHOWN = {"whiteboard"}
"""Rooms whose files stand whole on pages that are found instead of them."""
TOOLS = {"backends", "cli", "cluster", "testing"}
"""Rooms without the text of their files, which are used and not taken along."""
TELLING = re.compile(r"(lc\d-|planning/|cluster/|model\.md)")
"""Pages that teach; others show code as well."""
TITLE = re.compile(r"^title: \"?(.+?)\"?$", re.MULTILINE)


def taught_in() -> dict[str, list[str]]:
    """By module, a line of Markdown with the pages that show code of it, if any do."""
    pages: dict[str, dict[str, str]] = {}
    for key, where in authored.embedded().items():
        for page in where:
            at = page.relative_to(config.PAGES).as_posix()
            if not TELLING.match(at):
                continue
            title = TITLE.search(page.read_text(encoding="utf-8"))
            pages.setdefault(key.split(":")[0], {})[at] = title[1] if title else at
    return {
        module: [
            "Taught in " + ", ".join(f"[{t}](/{at})" for at, t in found.items()) + ".",
            "{ .xt-taught }",
            "",
        ]
        for module, found in pages.items()
    }


def _file(module: str) -> str:
    """The file of a module in a closed block."""
    path = symbols.module_path(module, config.SOURCE)
    code = path.read_text().rstrip("\n")
    lines = len(code.splitlines())
    shown = path.relative_to(config.SOURCE).as_posix()
    url = config.source_url(f"src/{shown}", 1, lines)
    return closed_block(f"{shown}, {lines} lines", code, url)
