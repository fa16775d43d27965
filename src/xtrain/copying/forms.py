"""The whiteboard forms, and what a reader downloads: a form with its self-check.

    whiteboard/comm/ring_all_reduce.py     the form, as it is
    copying/self_checks/comm.py            check_ring_all_reduce: an independent answer
    copying/self_checks/harness.py         starts 4 ranks, counts what they send

The file is the form, and below it the check and the functions that this needs. Tests
run the same checks at other sizes, in groups and in other dtypes. The files are read
and not imported: this needs the standard library alone.
"""

import ast
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
FIELDS = ("Computes", "Sends", "Leaves out")
WITHOUT_RANKS = "schedules"
"""The folder whose checks start no ranks."""
MOST_LINES = 60
"""Of code, as `lines_of_code` counts, in a whiteboard form."""


def forms(package: Path = PACKAGE) -> dict[str, Path]:
    """Every whiteboard form: its name and its file, folder by folder."""
    files = sorted((package / "whiteboard").glob("*/*.py"))
    return {file.stem: file for file in files if file.stem != "__init__"}


def header(text: str) -> dict[str, str]:
    """What a form's header says about it, by the words of `FIELDS`."""
    lines = (ast.get_docstring(ast.parse(text)) or "").splitlines()
    pairs = [line.partition(":") for line in lines]
    return {word: rest.strip() for word, _, rest in pairs if word in FIELDS}


def lines_of_code(text: str) -> int:
    """Lines of a form without its header, its imports and blank lines."""
    tree, kinds = ast.parse(text), (ast.Import, ast.ImportFrom)
    docstring = tree.body[: ast.get_docstring(tree) is not None]
    aside = [*docstring, *(node for node in tree.body if isinstance(node, kinds))]
    left_out = {n for a in aside for n in range(a.lineno, (a.end_lineno or 0) + 1)}
    lines = enumerate(text.splitlines(), start=1)
    return sum(bool(line.strip()) and n not in left_out for n, line in lines)


def whiteboard(name: str, package: Path = PACKAGE) -> str:
    """The file to download for the form `name`: as it is, and a self-check after it.

    Raises ValueError for an unknown name and says which ones come close.
    """
    known = forms(package)
    if name not in known:
        close = get_close_matches(name, known, n=3, cutoff=0.4) or list(known)
        raise ValueError(f"no whiteboard form {name!r}; there is: {', '.join(close)}")
    form = known[name].read_text(encoding="utf-8")
    title = f"# --- self-check: python {name}.py " + "-" * 40
    check = self_check(name, public_name(form), form, package=package)
    return f"{form.rstrip()}\n\n\n{title}\n\n{check}"


def self_check(
    name: str, called: str, above: str, instead: str = "", package: Path = PACKAGE
) -> str:
    """The program that checks what is `called` as the form `name` is checked.

    Args:
        above: the text below which it stands, and whose imports it does not repeat.
        instead: definitions that replace those of the harness.
    """
    folder, check = forms(package)[name].parent.name, check_file(name, package)
    shared = [check.with_name("harness.py"), check.with_name("training.py")]
    parts = Parts([] if folder == WITHOUT_RANKS else shared)
    parts.add(check)
    below = parts.reached(f"check_{name}", "run")
    lines = [
        *parts.imports_of(below, besides=above),
        *dict.fromkeys(parts.text[n] for n in below),
        *([instead.rstrip()] if instead else []),
        "",
        "",
        'if __name__ == "__main__":',
        f"    run(check_{name}, {called})",
        "",
    ]
    return "\n".join(lines)


def check_file(name: str, package: Path = PACKAGE) -> Path:
    """The file that has `check_NAME`; FileNotFoundError if there is none."""
    for path in sorted((package / "copying" / "self_checks").glob("*.py")):
        if f"\ndef check_{name}(" in path.read_text(encoding="utf-8"):
            return path
    raise FileNotFoundError(f"no self-check check_{name}")


def same_name(name: str, names: Iterable[str]) -> str | None:
    """The one of the names that this is, or is but for capitals and underscores."""
    letters = {n.replace("_", "").lower(): n for n in names}
    return name if name in names else letters.get(name.replace("_", "").lower())


class Parts:
    """The functions, classes and constants of some files, by name, and the imports."""

    def __init__(self, paths: Iterable[Path]) -> None:
        self.text: dict[str, str] = {}
        self.uses: dict[str, set[str]] = {}
        self.imports: dict[str, str] = {}
        for path in paths:
            self.add(path)

    def add(self, path: Path) -> None:
        """What a file defines, and what it imports that is not ours."""
        source = path.read_text(encoding="utf-8") if path.is_file() else ""
        for node in ast.parse(source).body:
            if isinstance(node, ast.Assign | ast.AnnAssign):
                targets = getattr(node, "targets", [getattr(node, "target", None)])
                bound = (n for t in targets for n in ast.walk(t))
                names = [n.id for n in bound if isinstance(n, ast.Name)]
            elif isinstance(node, ast.FunctionDef | ast.ClassDef):
                names = [node.name]
            else:
                self.imports |= imported(node)
                continue
            gap = "\n\n" if isinstance(node, ast.FunctionDef | ast.ClassDef) else "\n"
            text = gap + str(ast.get_source_segment(source, node))
            uses = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
            self.text |= dict.fromkeys(names, text)
            self.uses |= dict.fromkeys(names, uses)

    def reached(self, *names: str) -> list[str]:
        """These, and all that they use, in the order in which they stand."""
        found, left = set(), list(names)
        while left:
            name = left.pop()
            if name in self.text and name not in found:
                found.add(name)
                left += self.uses[name]
        return [name for name in self.text if name in found]

    def imports_of(self, names: Iterable[str], besides: str) -> list[str]:
        """The imports that these need, but for those of the text `besides`."""
        used = set().union(*(self.uses[name] for name in names))
        for node in ast.parse(besides).body:
            used -= imported(node).keys()
        return list(dict.fromkeys(t for n, t in self.imports.items() if n in used))


def imported(node: ast.stmt) -> dict[str, str]:
    """The names that an import binds, with the statement; nothing if it is ours."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name: f"import {written(a)}" for a in node.names}
    if isinstance(node, ast.ImportFrom) and not str(node.module).startswith("xtrain"):
        start = f"from {node.module} import"
        return {a.asname or a.name: f"{start} {written(a)}" for a in node.names}
    return {}


def written(name: ast.alias) -> str:
    """An imported name as it stands behind `import`."""
    return f"{name.name} as {name.asname}" if name.asname else name.name


def public_name(form: str) -> str:
    """The one public function or class of a form."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in ast.parse(form).body if isinstance(node, kinds)]
    return next(name for name in names if not name.startswith("_"))
