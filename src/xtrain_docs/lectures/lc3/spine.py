"""The spine under the stages of ZeRO: what the lecture's index page shows."""

from ...figures import REGISTRY as FIGURES
from ...spine.compare import Row, figure_of, table_of
from ...tables import REGISTRY as TABLES
from ...tables import Table


def rows() -> list[Row]:
    """The stages, and the last one once more with 16-bit numbers."""
    from .runs_spine import curve

    return [
        Row("ZeRO-1", curve, "1"),
        Row("ZeRO-2", curve, "2"),
        Row("ZeRO-3", curve, "3"),
        Row("ZeRO-3 in bfloat16", curve, "3 bf16"),
    ]


@FIGURES
def zero_spine(ranks: int = 4) -> str:
    """The loss of one process, and that of each stage on it."""
    return figure_of(rows(), ranks)


@TABLES
def zero_differences() -> Table:
    """How far each stage is from one process."""
    return table_of(rows())
