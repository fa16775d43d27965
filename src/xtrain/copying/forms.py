"""The whiteboard forms, and what a reader downloads: a form with its self-check.

    whiteboard/comm/ring_all_reduce.py             the form, as it is
    copying/self_checks/harness.py                 starts 4 ranks, counts what they send
    copying/self_checks/comm/ring_all_reduce.py    compares with an independent answer

A folder may have a harness of its own: a schedule is checked without any ranks.

The three are joined into one file that needs torch alone. Standard library only: the
files are read, none is imported.
"""

import ast
from difflib import get_close_matches
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]
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
    checks = package / "copying" / "self_checks"
    own = checks / known[name].parent.name
    start = own if (own / "harness.py").is_file() else checks
    form, harness, check = (
        path.read_text(encoding="utf-8")
        for path in (known[name], start / "harness.py", own / f"{name}.py")
    )
    there = set(form.splitlines())
    imports = [i for text in (harness, check) for i in _imports(text) if i not in there]
    return "\n".join(
        [
            form.rstrip(),
            "",
            "",
            f"# --- self-check: python {name}.py " + "-" * 40,
            "",
            *dict.fromkeys(imports),
            "",
            _code(harness),
            "",
            "",
            _code(check),
            "",
            "",
            'if __name__ == "__main__":',
            "    run(check)",
            "",
        ]
    )


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
