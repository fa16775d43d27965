"""`xtrain copy NAME`: code of ours as one file that runs without us."""

import argparse
import sys
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

from xtrain.copying.forms import forms, whiteboard
from xtrain.copying.library import library
from xtrain.copying.modules import CopyError
from xtrain.copying.standalone import standalone


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "Without --library an algorithm comes as its whiteboard form, a page of code "
        "with a self-check: `python FILE` runs it on 4 ranks. The library form is what "
        "`import xtrain` gives, less its checks of arguments and across ranks."
    )
    parser.add_argument(
        "name",
        nargs="?",
        help="an algorithm, a public name of the library, or module:name of anything",
    )
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write there")
    parser.add_argument("--force", action="store_true", help="replace FILE")
    parser.add_argument("--library", action="store_true", help="the library form")
    parser.add_argument("--list", action="store_true", help="all names, with lines")


def run(arguments: argparse.Namespace) -> int:
    """Print or write one copy."""
    if arguments.list:
        print(listing())
        return 0
    if arguments.name is None:
        raise CopyError("copy what? `xtrain copy --list` names everything")
    kind, text = find(arguments.name, arguments.library)
    path = arguments.output
    if path is None:
        print(text, end="")
    else:
        write(path, text, arguments.force)
    where = "" if path is None else f" -> {path}"
    lines = len(text.splitlines())
    print(f"{kind}: {lines} lines{where}", file=sys.stderr)
    return 0


def write(path: Path, text: str, force: bool) -> None:
    """Into a new file, or with `force` over a file that is there.

    A link that leads nowhere is refused, too: what it names is not what was typed.
    """
    there = path.exists() or path.is_symlink()
    if there and not force:
        raise CopyError(f"{path} exists: pass --force to replace it")
    if there and not path.is_file():
        raise CopyError(f"{path} is not a regular file")
    with path.open("w" if there else "x", encoding="utf-8") as file:
        file.write(text)


def find(name: str, from_library: bool = False) -> tuple[str, str]:
    """Which form a name gives, and its text; NaiveDataParallel is a class's name,
    naive_data_parallel that of its whiteboard form: either gives either."""
    if ":" in name:
        return "library form", standalone(name)
    known, drawn = library(), forms()
    form, public = _same(name, drawn), _same(name, known)
    if form and not from_library:
        return f"whiteboard form {form}, with self-check", whiteboard(form)
    if public:
        only = "" if form else ", no whiteboard form has that name"
        return f"library form {known[public]}{only}", standalone(known[public])
    every = [*known, *([] if from_library else drawn)]
    close = get_close_matches(name, dict.fromkeys(every), n=3, cutoff=0.7)
    nearest = f"nearest: {', '.join(close)}"
    what = "library form" if from_library else "algorithm"
    raise CopyError(
        f"there is no {what} {name[:40]!r}; "
        + (nearest if close else "`xtrain copy --list` names everything")
    )


def listing() -> str:
    """A table: every name, the lines of its whiteboard form and of its library copy."""
    known, drawn = library(), forms()
    rows = [("name", "whiteboard", "library", "library form is")]
    for form, path in drawn.items():
        found = known.pop(_same(form, known) or "", "")
        rows.append((form, _lines(path.read_text(encoding="utf-8")), *_copy(found)))
    rows += [(name, "", *_copy(reference)) for name, reference in known.items()]
    width = max(len(row[0]) for row in rows)
    lines = [f"{a:{width}}  {b:>10}  {c:>7}  {d}" for a, b, c, d in rows]
    return "\n".join(line.rstrip() for line in lines)


def _copy(reference: str) -> tuple[str, str]:
    return (_lines(standalone(reference)) if reference else "", reference)


def _same(name: str, names: Iterable[str]) -> str | None:
    """The one of the names that this is, or is but for capitals and underscores."""
    letters = {n.replace("_", "").lower(): n for n in names}
    return name if name in names else letters.get(name.replace("_", "").lower())


def _lines(text: str) -> str:
    return str(len(text.splitlines()))
