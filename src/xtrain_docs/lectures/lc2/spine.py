"""The spine under the wrappers of lc2: what its index page shows."""

from ...figures import REGISTRY as FIGURES
from ...spine.compare import Row, figure_of, table_of
from ...tables import REGISTRY as TABLES
from ...tables import Table


def rows() -> list[Row]:
    """The wrappers, in the order of the lecture."""
    from .runs_spine import curve

    return [
        Row("naive", curve, "naive"),
        Row("DDP", curve, "ddp"),
        Row("DDP, two micro-batches", curve, "no_sync"),
    ]


@FIGURES
def data_parallel_spine(ranks: int = 4) -> str:
    """The loss of one process, and that of each wrapper on it."""
    return figure_of(rows(), ranks)


@TABLES
def data_parallel_differences() -> Table:
    """How far each wrapper is from one process."""
    return table_of(rows())
