"""Explains a wrong file: is it one of the mistakes that are known?

A wrong file is compared with mistakes that are known (`mistakes/*.toml`): with each of
them planted into the solution, does the solution do exactly what the file does?
"""

import ast
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from xtrain.practice.drills import Drill
from xtrain.practice.outcomes import Outcome
from xtrain.practice.verdicts import Verdict

MISTAKES = Path(__file__).parent / "mistakes"


@dataclass(frozen=True, slots=True)
class Mistake:
    """An error that people make: `old` of the solution became `new`."""

    old: str
    new: str
    words: str

    def planted(self, solution: str) -> str:
        """The solution with the mistake; ValueError unless `old` stands there once."""
        if solution.count(self.old) != 1:
            raise ValueError(
                f"{self.old!r} stands there {solution.count(self.old)} times"
            )
        return solution.replace(self.old, self.new)

    def line_in(self, source: str) -> int | None:
        """Where the same statement stands in another file."""
        changed = {line.strip() for line in self.new.splitlines()}
        changed -= {"", *(line.strip() for line in self.old.splitlines())}
        wanted = max(changed, key=len, default="")
        lines = enumerate(source.splitlines(), start=1)
        places = [number for number, line in lines if wanted and wanted in line]
        return places[0] if len(places) == 1 else None


def mistakes_of(drill: Drill) -> list[Mistake]:
    """Those that are known of a drill."""
    path = MISTAKES / f"{drill.folder}.toml"
    if not path.is_file():
        return []
    entries = tomllib.loads(path.read_text(encoding="utf-8")).get(drill.name, [])
    return [
        Mistake(*(entry[key].strip("\n") for key in ("old", "new", "words")))
        for entry in entries
    ]


def explained(
    drill: Drill,
    source: str,
    found: list[Outcome] | None,
    wrong: Verdict,
    run: Callable[[str], Iterable[Outcome] | None],
) -> Verdict:
    """The verdict on a wrong file, with the known mistake that it makes.

    Args:
        run: gives the outcomes of another file of this drill.
    """
    for mistake in mistakes_of(drill):
        if the_same(run(mistake.planted(drill.solution)), alike(found)):
            return wrong.known(mistake.words, mistake.line_in(source))
    return wrong.more(SHARED) if keeps_globals(source) else wrong


SHARED = "Each rank is a process of its own: other ranks do not see your globals."


def keeps_globals(source: str) -> bool:
    """Has the file a dict, list or set of its own, which functions can fill?"""
    bound = [
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Assign | ast.AnnAssign)
    ]
    made = {ast.unparse(v.func) for v in bound if isinstance(v, ast.Call)}
    filled = any(isinstance(v, ast.Dict | ast.List | ast.Set) for v in bound)
    return filled or not made.isdisjoint(("dict", "list", "set", "defaultdict"))


def alike(outcomes: list[Outcome] | None) -> list[str] | None:
    """What two files that make the same mistake have in common."""
    return None if outcomes is None else [one.alike() for one in outcomes]


def the_same(planted: Iterable[Outcome] | None, wanted: list[str] | None) -> bool:
    """Does it do what a file does? The first case that differs is the last one run."""
    if planted is None or wanted is None:
        return planted is None and wanted is None
    pairs = zip_longest((one.alike() for one in planted), wanted)
    return all(one == other for one, other in pairs)


def forbidden(source: str) -> str:
    """Why a file is refused before it runs; empty if it is not."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        return f"SyntaxError: {getattr(error, 'msg', error)}" + (
            f" (line {line})" if line else ""
        )
    for node in ast.walk(tree):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value] if node.value.startswith("xtrain.") else []
        if any(name.split(".")[0] == "xtrain" for name in names):
            line = getattr(node, "lineno", 0)
            return (
                f"Line {line} imports xtrain: write it with torch and the "
                f"standard library."
            )
    return ""
