"""The spine in stages: what the lecture's index page shows."""

from ...figures import REGISTRY as FIGURES
from ...spine.compare import Row, figure_of, table_of
from ...tables import REGISTRY as TABLES
from ...tables import Table


def rows() -> list[Row]:
    """Pipeline ranks alone, and with two data ranks under the wrappers of lc2, lc3."""
    from .runs_spine import curve

    return [
        Row("1F1B", curve, "one_f_one_b"),
        Row("ZB-H1", curve, "zb_h1"),
        Row("1F1B × data, DDP", curve, "ddp one_f_one_b", (4,)),
        Row("ZB-V × data, ZeRO-2", curve, "zero 2 zb_v", (4,)),
        Row("interleaved × data, FSDP", curve, "fsdp interleaved", (4,)),
    ]


@FIGURES
def pipeline_spine() -> str:
    """The loss of one process, and that of each layout of four ranks on it."""
    return figure_of(rows(), 4)


@TABLES
def pipeline_differences() -> Table:
    """How far each layout is from one process."""
    return table_of(rows())
