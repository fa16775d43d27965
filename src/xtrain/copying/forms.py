"""The whiteboard forms, and what a reader downloads: a form with its self-check.

    whiteboard/comm/ring_all_reduce.py             the form, as it is
    copying/self_checks/harness.py                 starts 4 ranks, counts what they send
    copying/self_checks/comm/sums.py               what checks of its folder share
    copying/self_checks/comm/ring_all_reduce.py    compares with an independent answer

The form, what its check imports of ours, and the check are joined into one file that
needs torch alone. Tests run the same checks at other sizes, in groups and dtypes.
Standard library only: the files are read, none is imported.
"""

import ast
from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
CHECKS = "copying.self_checks"
FIELDS = ("Computes", "Sends", "Leaves out")
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
    check = package / "copying" / "self_checks" / known[name].parent.name / f"{name}.py"
    form = known[name].read_text(encoding="utf-8")
    parts = [text.read_text(encoding="utf-8") for text in _needed(check, package)]
    there = set(form.splitlines())
    imports = [i for text in parts for i in _imports(text) if i not in there]
    lines = [form.rstrip(), "", "", f"# --- self-check: python {name}.py " + "-" * 40]
    lines += ["", *dict.fromkeys(imports)]
    for text in parts:
        lines += ["", _code(text), ""]
    call = f"run(check, {_public(form)})"
    return "\n".join([*lines, "", 'if __name__ == "__main__":', f"    {call}", ""])


def _needed(check: Path, package: Path) -> list[Path]:
    """The files of the harness that a check imports, each after what it needs itself.

    The last one is the check. One with ranks starts them by the first harness.
    """
    found: dict[Path, None] = {}
    for node in _head(check.read_text(encoding="utf-8")):
        module = str(getattr(node, "module", ""))
        if module.startswith(f"xtrain.{CHECKS}."):
            path = package.parent.joinpath(*module.split(".")).with_suffix(".py")
            found |= dict.fromkeys(_needed(path, package))
    return [*found, check]


def _public(form: str) -> str:
    """The one public name of a form."""
    kinds = (ast.FunctionDef, ast.ClassDef)
    names = [node.name for node in ast.parse(form).body if isinstance(node, kinds)]
    return next(name for name in names if not name.startswith("_"))


def _head(text: str) -> list[ast.stmt]:
    """The docstring and the imports with which a file begins."""
    body = ast.parse(text).body
    kinds = (ast.Import, ast.ImportFrom, ast.Expr)
    end = next((i for i, node in enumerate(body) if not isinstance(node, kinds)), None)
    return body[:end]


def _imports(text: str) -> list[str]:
    """A file's imports, less those of xtrain: in the joined file these names stand."""
    return [
        ast.unparse(node)
        for node in _head(text)
        if isinstance(node, ast.Import)
        or (
            isinstance(node, ast.ImportFrom)
            and not str(node.module).startswith("xtrain")
        )
    ]


def _code(text: str) -> str:
    """A file without its head."""
    head = _head(text)
    lines = text.splitlines()[head[-1].end_lineno if head else 0 :]
    return "\n".join(lines).strip("\n")
