"""Goodput of a run with kills beside its formula, as `xtrain.bench.goodput` had it."""

import json
from typing import Any

from ... import config
from ...amounts import percent, seconds
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import value


def runs() -> dict[str, Any]:
    """The record of the runs."""
    path = config.ROOT / "docs/data/runs/goodput.json"
    found: dict[str, Any] = json.loads(path.read_text())
    return found


@value
def goodput_run(what: str) -> float:
    """Of all rows the mean: seconds between kills, or of a restart."""
    rows = runs()["rows"]
    return float(sum(row[what] for row in rows) / len(rows))


@TABLES
def goodput_runs() -> Table:
    """Measured beside the formula, and what nine of ten such runs have."""
    header = ["checkpoint every", "steps kept", "kills", "restart", "measured",
              "formula", "9 of 10 such runs"]  # fmt: skip
    rows = []
    for row in runs()["rows"]:
        low, high = map(percent, row["simulated"])
        rows.append([
            f"{row['every']} steps", f"{row['steps']}", f"{row['kills']}",
            seconds(row["restart"]), percent(row["measured"]), percent(row["formula"]),
            f"{low} to {high}",
        ])  # fmt: skip
    return Table(header, rows, "l" + "r" * (len(header) - 1))
