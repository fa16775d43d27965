"""A page for each public module, from its docstrings: docs/en/reference/*/**."""

import ast

from . import config, symbols
from .generated import prune, write


def modules() -> list[str]:
    """Every public module of xtrain that defines something public."""
    found = []
    for path in sorted((config.SOURCE / "xtrain").rglob("*.py")):
        parts = path.relative_to(config.SOURCE).with_suffix("").parts
        if parts[-1] == "__init__":
            parts = parts[:-1]
        if any(part.startswith("_") or part == "self_checks" for part in parts):
            continue
        if not (path.parent / "__init__.py").is_file():
            continue
        tree = ast.parse(path.read_text())
        public = [
            node
            for node in tree.body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
            and not node.name.startswith("_")
        ]
        constants = [
            node
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            and path.name != "__init__.py"
        ]
        if public or constants:
            found.append(".".join(parts))
    return found


def _summary(module: str) -> str:
    text = symbols.module_path(module, config.SOURCE).read_text()
    doc = ast.get_docstring(ast.parse(text)) or ""
    return doc.split("\n\n")[0].replace("\n", " ").strip()


def write_reference() -> int:
    """docs/en/reference/<package>/<module>.md; returns how many."""
    folder = config.PAGES / "reference"
    kept = {folder / "index.md"}
    index = [
        "---",
        "title: Reference",
        "description: Every public name of xtrain, module by module.",
        "generated: true",
        "---",
        "",
        "# Reference",
        "",
        "Every public name, module by module, from the docstrings. The code of each "
        "one is a click away.",
        "",
    ]
    package = ""
    for module in modules():
        parts = module.split(".")
        top = ".".join(parts[:2])
        if top != package:
            package = top
            index += ["", f"## `{package}`", ""]
        page = folder / parts[1] / f"{'.'.join(parts[2:]) or 'package'}.md"
        kept.add(write(page, _reference_page(module)))
        link = page.relative_to(folder).as_posix()
        index.append(f"- [`{module}`]({link}): {_summary(module)}")
    write(folder / "index.md", "\n".join([*index, ""]))
    prune(folder, kept)
    return len(kept)


def _reference_page(module: str) -> str:
    path = symbols.module_path(module, config.SOURCE)
    source = path.relative_to(config.SOURCE).as_posix()
    return "\n".join(
        [
            "---",
            f"title: {module}",
            f"description: Reference of {module}, from its docstrings.",
            "search: {boost: 0.6}",
            "generated: true",
            "---",
            "",
            f"# `{module}`",
            "",
            f"[{source}](/source/{source}.md){{ .xt-path }}",
            "{ .xt-bar .xt-alone }",
            "",
            f"::: {module}",
            "",
        ]
    )
