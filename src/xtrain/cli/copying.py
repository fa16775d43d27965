"""`xtrain copy NAME`: code as files that run without xtrain."""

import argparse
import sys
from difflib import get_close_matches
from pathlib import Path

from xtrain.copying.forms import forms, same_name, whiteboard
from xtrain.copying.library import SOURCE as ROOT
from xtrain.copying.library import CopyError, library, needed, write_library


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = (
        "An algorithm comes as its whiteboard form, a page of code with a self-check: "
        "`python FILE` runs it on 4 ranks. With --library it comes as `import xtrain` "
        "gives it: a package of the modules that it needs."
    )
    parser.add_argument(
        "name",
        nargs="?",
        help="an algorithm, a public name of the library, or module:name of anything",
    )
    parser.add_argument(
        "-o", "--output", type=Path, metavar="PATH", help="the file, or the folder"
    )
    parser.add_argument("--force", action="store_true", help="replace the file")
    parser.add_argument("--library", action="store_true", help="the library form")
    parser.add_argument("--list", action="store_true", help="all names, with lines")


def run(arguments: argparse.Namespace) -> int:
    """Print or write one copy."""
    if arguments.list:
        print(listing())
        return 0
    name, path = arguments.name, arguments.output
    if name is None:
        raise CopyError("copy what? `xtrain copy --list` names everything")
    form = None if arguments.library or ":" in name else same_name(name, forms())
    if form is None:
        reference = name if ":" in name else of_library(name, arguments.library)
        copy_library(reference, path)
        return 0
    text = whiteboard(form)
    if path is None:
        print(text, end="")
    else:
        write(path, text, arguments.force)
    where = "" if path is None else f" -> {path}"
    what = f"whiteboard form {form}, with self-check"
    print(f"{what}: {len(text.splitlines())} lines{where}", file=sys.stderr)
    return 0


def of_library(name: str, only_library: bool) -> str:
    """`module:name` of a public name; CopyError names the nearest if there is none."""
    known = library()
    found = same_name(name, known)
    if found:
        return known[found]
    every = [*known, *([] if only_library else forms())]
    close = get_close_matches(name, dict.fromkeys(every), n=3, cutoff=0.7)
    nearest = f"nearest: {', '.join(close)}"
    what = "library form" if only_library else "algorithm"
    raise CopyError(
        f"there is no {what} {name[:40]!r}; "
        + (nearest if close else "`xtrain copy --list` names everything")
    )


def copy_library(reference: str, folder: Path | None) -> None:
    """Write the package of a library form."""
    if folder is None:
        raise CopyError(f"{reference} is a package of several files: name it, -o DIR")
    modules, lines = write_library(reference, folder)
    print(f"{reference}: {modules} modules, {lines} lines -> {folder}", file=sys.stderr)
    run = f"python -m {folder.resolve().name}.check"
    print(f"Beside the folder, `{run}` checks it.", file=sys.stderr)


def write(path: Path, text: str, force: bool) -> None:
    """Into a new file, or with `force` over a file that is there.

    A dangling link is refused, too.
    """
    there = path.exists() or path.is_symlink()
    if there and not force:
        raise CopyError(f"{path} exists: pass --force to replace it")
    if there and not path.is_file():
        raise CopyError(f"{path} is not a regular file")
    with path.open("w" if there else "x", encoding="utf-8") as file:
        file.write(text)


def listing() -> str:
    """A table: every name, the lines of its whiteboard form, where the library's is."""
    known, drawn = library(), forms()
    rows = [("name", "whiteboard", "modules", "library form is")]
    for form, path in drawn.items():
        found = known.pop(same_name(form, known) or "", "")
        lines = len(path.read_text(encoding="utf-8").splitlines())
        rows.append((form, str(lines), modules_of(found), found))
    rows += [(name, "", modules_of(known[name]), known[name]) for name in known]
    width = max(len(row[0]) for row in rows)
    table = [f"{a:{width}}  {b:>10}  {c:>7}  {d}" for a, b, c, d in rows]
    return "\n".join(line.rstrip() for line in table)


def modules_of(reference: str) -> str:
    """How many modules a library form needs."""
    module = reference.partition(":")[0]
    return str(len(needed(module, ROOT)[0])) if module else ""
