"""The drills: minutes, difficulty, and how many mistakes are known of each."""

from xtrain.copying.forms import lines_of_code
from xtrain.practice.drills import Drill
from xtrain.practice.drills import drill as drill_of
from xtrain.practice.drills import drills as all_drills
from xtrain.practice.judging import mistakes_of
from xtrain.practice.page import IN_PAGE

from ..drill_pages import stars
from . import REGISTRY, Table

HEADER = ("drill", "minutes", "difficulty", "lines of code", "known mistakes", "here")


def row(one: Drill) -> tuple[str, ...]:
    write = f"[write](practise.md#{one.name})" if one.name in IN_PAGE else ""
    return (
        f"[`{one.name}`](whiteboard.md#{one.name})", str(one.minutes), stars(one),
        str(lines_of_code(one.solution)), str(len(mistakes_of(one))), write,
    )  # fmt: skip


@REGISTRY
def drills(lecture: str) -> Table:
    """Those of one lecture."""
    known = [one for one in all_drills().values() if one.lecture == lecture]
    return Table(HEADER, [row(one) for one in known], "lrlrrl")


@REGISTRY
def drill_path(names: str) -> Table:
    """Some drills in an order, with the minutes so far."""
    rows, minutes = [], 0
    for name in names.split():
        one = drill_of(name)
        minutes += one.minutes
        link = f"[`{name}`](../whiteboard.md#{name})"
        rows.append((link, str(one.minutes), str(minutes)))
    return Table(("drill", "minutes", "so far"), rows, "lrr")
