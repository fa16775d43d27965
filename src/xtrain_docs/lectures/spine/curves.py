"""The loss curves of a lecture's wrappers beside that of one process."""

from ... import runs
from ...figures import REGISTRY as FIGURES
from ...spine.compare import Row, figure_of, table_of
from ...spine.reference import Curve, reference
from ...spine.wrappers import LAYOUTS, curve
from ...tables import REGISTRY as TABLES
from ...tables import Table


def rows(lecture: str) -> list[Row]:
    """The wrappers, in the order of the lecture."""
    right = with_experts if lecture == "lc7" else reference
    return [
        Row(name, curve, (lecture, name), layout.ranks, right)
        for name, layout in LAYOUTS[lecture].items()
    ]


def with_experts() -> Curve:
    """One process with all experts: other weights, so another curve; a kept run."""
    return runs.remembered(curve, 1, "lc7", "experts on all ranks")[0]


@FIGURES
def spine(lecture: str) -> str:
    """The loss of one process, and that of each wrapper of four ranks on it."""
    return figure_of(rows(lecture), 4)


@TABLES
def spine_differences(lecture: str) -> Table:
    """How far each wrapper is from one process."""
    return table_of(rows(lecture))
