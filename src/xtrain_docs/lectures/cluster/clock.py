"""The page on the clock: recorded times beside those of formulas and other clocks."""

import json
from typing import Any

from ... import config
from ...amounts import seconds as as_seconds
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value

FOLDER = config.ROOT / "docs" / "data" / "cluster"


def recorded(name: str) -> Any:
    return json.loads((FOLDER / name).read_text())


def results_over(backend: str) -> dict[str, Any]:
    results = recorded("clock.json")["results"]
    (found,) = (each for each in results if each["backend"] == backend)
    return found


def error(row: dict[str, Any]) -> float:
    return row["virtual_seconds"] / row["real_seconds"] - 1


@TABLES
def clock_simgrid() -> Table:
    """Last end of every pattern by both clocks."""
    rows = [
        [row["pattern"], f"`{row['topology']}`", str(row["ranks"]),
         as_seconds(row["seconds"], 4), as_seconds(row["simgrid_seconds"], 4)]
        for row in recorded("simgrid.json")
    ]  # fmt: skip
    header = ["pattern", "topology", "ranks", "virtual cluster", "SimGrid"]
    return Table(header, rows, "llrrr")


@TABLES
def clock_real(backend: str) -> Table:
    """Real and virtual times of every program."""
    rows = [
        [row["program"], as_seconds(row["real_seconds"]),
         as_seconds(row["virtual_seconds"]), f"{error(row):+.1%}".replace("%", " %")]
        for row in results_over(backend)["rows"]
    ]  # fmt: skip
    return Table(["program", "real", "virtual", "difference"], rows, "lrrr")


@value
def clock_network(backend: str, which: str) -> str:
    """Latency and bandwidth that were calibrated."""
    latency, bandwidth = results_over(backend)["networks"][which]
    return f"{as_seconds(latency, 2)} and {bandwidth / 1e9:.1f} GB/s"


def all_rows() -> list[dict[str, Any]]:
    return [row for each in recorded("clock.json")["results"] for row in each["rows"]]


@value
def clock_rows() -> int:
    """How many programs were compared, over all backends."""
    return len(all_rows())


@value
def clock_misses(aim: float = 0.15) -> int:
    """How many of them differ by more."""
    return sum(abs(error(row)) > aim for row in all_rows())
