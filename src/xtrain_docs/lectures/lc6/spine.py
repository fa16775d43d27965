"""The spine with cut sequences: what the lecture's index page shows."""

from ...figures import REGISTRY as FIGURES
from ...spine.compare import Row, figure_of, table_of
from ...tables import REGISTRY as TABLES
from ...tables import Table


def rows() -> list[Row]:
    """Each attention alone, and a ring beside tensor ranks and beside data ranks."""
    from .runs_spine import curve

    return [
        Row("ring, zigzag", curve, "ring"),
        Row("Ulysses", curve, "ulysses"),
        Row("all-gather, zigzag", curve, "all_gather"),
        Row("ring × tensor", curve, "tensor", (4,)),
        Row("data × ring, FSDP", curve, "fsdp", (4,)),
    ]


@FIGURES
def context_spine() -> str:
    """The loss of one process, and that of each layout of four ranks on it."""
    return figure_of(rows(), 4)


@TABLES
def context_differences() -> Table:
    """How far each layout is from one process."""
    return table_of(rows())
