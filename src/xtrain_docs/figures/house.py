"""The rooms of the package, on the floors that their imports give them."""

import ast
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

from xtrain.evidence.closure import imports

from ..svg import cell, document, text
from ..tables import REGISTRY as TABLES
from ..tables import Table
from . import REGISTRY

PACKAGE = Path(__file__).parents[2] / "xtrain"
WIDTH, LEFT, HIGH, GAP, BOX, IN_A_ROW = 420, 24, 34, 5, 28, 3


@dataclass(frozen=True)
class Room:
    """A folder of the package, or a module at its top."""

    name: str
    says: str
    files: int
    lines: int
    uses: frozenset[str]


@lru_cache(maxsize=1)
def rooms(package: Path = PACKAGE) -> dict[str, Room]:
    """Every room by its name, with the rooms that its files import from."""
    found = {}
    for path in sorted(package.iterdir()):
        if path.name.startswith("__") or not (path.is_dir() or path.suffix == ".py"):
            continue
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        says = ast.get_docstring(ast.parse(files[0].read_text())) or ""
        uses = {name for file in files for name in used_by(file, package)}
        found[path.stem] = Room(
            path.stem,
            says.split("\n")[0].rstrip("."),
            len(files),
            sum(len(file.read_text().splitlines()) for file in files),
            frozenset(uses - {path.stem}),
        )
    return {
        name: Room(name, room.says, room.files, room.lines, room.uses & found.keys())
        for name, room in found.items()
    }


def used_by(file: Path, package: Path) -> set[str]:
    """The first name below the package of everything that a file imports."""
    own = ".".join(file.relative_to(package.parent).parent.parts)
    found = (name.split(".") for name in imports(file.read_text(encoding="utf-8"), own))
    return {parts[1] for parts in found if parts[0] == package.name and parts[1:]}


def floors() -> list[list[str]]:
    """Rooms from the lowest floor up: each is above all rooms that it imports from."""
    known = rooms()

    @cache
    def height(name: str) -> int:
        return 1 + max((height(other) for other in known[name].uses), default=-1)

    tops = range(1 + max(map(height, known)))
    return [[name for name in known if height(name) == top] for top in tops]


@REGISTRY
def house() -> str:
    """Floors as rows, the ground at the bottom; a box for each room."""
    parts, y = [], 6.0
    for number, names in reversed(list(enumerate(floors()))):
        parts.append(text(6, y + 18.5, str(number), "xt-tick"))
        wide = (WIDTH - LEFT) / min(len(names), IN_A_ROW)
        for place, name in enumerate(names):
            row, column = divmod(place, IN_A_ROW)
            room = rooms()[name]
            parts += cell(LEFT + wide * column, y + HIGH * row, wide - GAP, BOX, number,
                          name, hover=f"{room.says}; {room.lines:,} lines")  # fmt: skip
        y += HIGH * (1 + (len(names) - 1) // IN_A_ROW)
    told = "; ".join(f"{n}: {', '.join(names)}" for n, names in enumerate(floors()))
    return document(WIDTH, y, parts, "Rooms by floor", told)


@TABLES
def house_rooms() -> Table:
    """What each room is, how much it holds, and which rooms it imports from."""
    rows = [
        [f"`{name}`", room.says, str(room.files), f"{room.lines:,}",
         ", ".join(f"`{other}`" for other in sorted(room.uses)) or "none"]
        for names in floors() for name in names for room in [rooms()[name]]
    ]  # fmt: skip
    return Table(["room", "what it is", "files", "lines", "imports"], rows, "llrrl")
