"""The spine on meshes of tensor ranks: what the lecture's index page shows."""

from ...figures import REGISTRY as FIGURES
from ...spine.compare import Row, figure_of, table_of
from ...tables import REGISTRY as TABLES
from ...tables import Table


def rows() -> list[Row]:
    """A cut model alone, and on two data ranks under the wrappers of lc2 and lc3."""
    from .runs_spine import curve

    return [
        Row("tensor", curve, "tensor"),
        Row("tensor and sequence", curve, "sequence"),
        Row("data × tensor, DDP", curve, "ddp", (4,)),
        Row("data × tensor, ZeRO-1", curve, "zero 1", (4,)),
        Row("data × tensor, FSDP", curve, "fsdp", (4,)),
    ]


@FIGURES
def tensor_spine() -> str:
    """The loss of one process, and that of each layout of four ranks on it."""
    return figure_of(rows(), 4)


@TABLES
def tensor_differences() -> Table:
    """How far each layout is from one process."""
    return table_of(rows())
