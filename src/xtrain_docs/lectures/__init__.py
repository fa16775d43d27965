"""A folder for each lecture or section: what its pages draw, and the runs behind it.

    lc1/<page>.py    what the page computes: runs on ranks, tables, figures, traces

A lecture imports nothing of another one, and nothing outside this folder imports a
lecture; what several of them need lies one folder up (`runs`, `svg`, and the
tables and figures of the races).
"""

from functools import cache
from importlib import import_module
from pathlib import Path


@cache
def load() -> None:
    """Import what pages call by name."""
    for file in sorted(Path(__file__).parent.glob("*/*.py")):
        if file.stem != "__init__":
            import_module(f"{__name__}.{file.parent.name}.{file.stem}")
