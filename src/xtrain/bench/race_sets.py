"""The sets of races there are, one module of `xtrain.bench.races` each.

lc1            a set
  all_reduce   a race of it: its contestants, sizes and numbers of ranks
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType

from xtrain.bench import races, report
from xtrain.bench.race import Race


def names() -> list[str]:
    """Every set of races there is."""
    return sorted(module.name for module in pkgutil.iter_modules(races.__path__))


def load(name: str) -> ModuleType:
    """The module with these races."""
    return importlib.import_module(f"{races.__name__}.{name}")


def list_lines() -> list[str]:
    """All races with their contestants and sizes."""
    lines = []
    for name in names():
        module = load(name)
        lines.append(f"{name}  {module.TITLE}")
        for race in module.RACES:
            sizes = ", ".join(report.bytes_text(size) for size in race.sizes)
            ranks = " and ".join(str(count) for count in race.ranks)
            others = ", ".join(c.name for c in race.contestants[1:])
            lines.append(f"  {race.name}: {race.title}; {sizes}; {ranks} ranks")
            lines.append(f"    {others}  against {race.contestants[0].name}")
    return lines


def choose(
    races: Sequence[Race],
    names: Sequence[str] | None = None,
    ranks: Sequence[int] | None = None,
    sizes: Sequence[int] | None = None,
) -> list[Race]:
    """The races of these names, with other ranks or sizes where given.

    ValueError for a name that no race has.
    """
    unknown = set(names or ()) - {race.name for race in races}
    if unknown:
        raise ValueError(
            f"no race {', '.join(sorted(unknown))}; there are: "
            + ", ".join(race.name for race in races)
        )
    return [
        dataclasses.replace(
            race, ranks=tuple(ranks or race.ranks), sizes=tuple(sizes or race.sizes)
        )
        for race in races
        if not names or race.name in names
    ]
