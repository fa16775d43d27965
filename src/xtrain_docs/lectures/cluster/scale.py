"""The page on scale: recorded seconds and bytes of small and of large programs."""

from collections.abc import Sequence
from typing import Any

from ...amounts import seconds as as_seconds
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value
from .clock import recorded


def scale_rows() -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = recorded("scale.json")["rows"]
    return rows


def at(rows: Sequence[dict[str, Any]], ranks: int) -> str:
    found = [row["processor_seconds"] for row in rows if row["ranks"] == ranks]
    return as_seconds(found[0], 2) if found else ""


@TABLES
def cluster_scale() -> Table:
    """Processor seconds of each program, by ranks, and its memory at the most."""
    names = list(dict.fromkeys(row["program"] for row in scale_rows()))
    table = []
    for name in names:
        rows = [row for row in scale_rows() if row["program"] == name]
        most = max(row["peak_bytes"] for row in rows) / 1e9
        table.append([name, *(at(rows, n) for n in (64, 256, 1024)), f"{most:.1f} GB"])
    header = ["program", "64 ranks", "256", "1,024", "memory at the most"]
    return Table(header, table, "lrrrr")


@value
def ring_growth() -> float:
    """How many times as long the ring takes on four times the ranks."""
    seconds = {
        row["ranks"]: row["processor_seconds"]
        for row in scale_rows()
        if row["program"] == "ring all-reduce"
    }
    return seconds[1024] / seconds[256]


@TABLES
def cluster_shapes() -> Table:
    """What steps of large models take, there and on this machine."""
    rows = [
        [row["program"], f"{row['running']} of {row['ranks']}",
         f"{row['processor_seconds']} s", as_seconds(row["virtual_seconds"]),
         f"{row['least_memory'] / 1e9:.1f} to {row['most_memory'] / 1e9:.1f} GB"]
        for row in recorded("shapes.json")["rows"]
    ]  # fmt: skip
    header = ["program", "ranks that run", "processor", "virtual", "memory of a rank"]
    return Table(header, rows, "lrrrr")
