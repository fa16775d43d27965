"""The spine with experts: what the lecture's index page shows.

Its model has other weights than that of the lectures before, so its curve of one
process is another one, too. It comes from a run of one rank, which is kept.
"""

from ... import runs
from ...figures import REGISTRY as FIGURES
from ...spine.compare import RANKS, chart, checked, power
from ...spine.reference import Curve, difference
from ...tables import REGISTRY as TABLES
from ...tables import Table

ROWS = (
    ("experts on all ranks", "expert", (2, 4)),
    ("expert_data × expert", "replicas", (4,)),
    ("the same, FSDP", "fsdp", (4,)),
    ("expert × tensor", "tensor", (4,)),
)
"""What figure and table call it, the run's layout, and on how many ranks."""


def one_process() -> Curve:
    """The curve of one process with all experts."""
    from .runs_spine import curve

    return runs.remembered(curve, 1, "one process")[0]


def curve_of(layout: str, ranks: int) -> Curve:
    """That of a layout, held against one process."""
    from .runs_spine import curve

    found = runs.remembered(curve, ranks, layout)
    return checked(found, one_process(), f"{layout}, {ranks} ranks")


@FIGURES
def expert_spine() -> str:
    """The loss of one process, and that of each layout of four ranks on it."""
    curves = {name: curve_of(layout, 4)["loss"] for name, layout, _ in ROWS}
    title = "Loss of each step, one process and 4 ranks"
    return chart(one_process()["loss"], curves, title)


@TABLES
def expert_differences() -> Table:
    """How far each layout is from one process."""
    right, rows = one_process(), []
    for name, layout, sizes in ROWS:
        curves = {ranks: curve_of(layout, ranks) for ranks in sizes}
        losses = [
            power(difference(curves[ranks], right, "loss")) if ranks in curves else ""
            for ranks in RANKS
        ]
        norm = max(difference(curve, right, "norm") for curve in curves.values())
        rows.append([name, *losses, power(norm)])
    header = ["", *(f"loss, {ranks} ranks" for ranks in RANKS), "gradient norm"]
    return Table(header, rows, "lrrr")
