"""The picture of both expert axes, and the table of gradients over them."""

from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table

WIDTH = 400


@TABLES
def expert_gradient_scale(sizes: tuple[int, ...] = (2, 4)) -> Table:
    """Relative difference of gradients to one process, right and with two mistakes."""
    from .runs_dispatch import gradient_errors

    names = {
        "experts": "expert weights, as they are",
        "experts, averaged": "expert weights, divided by the ranks",
        "router": "router, as it is",
        "router, summed": "router, summed over the ranks",
    }
    rows = []
    for key, name in names.items():
        cells = []
        for ranks in sizes:
            worst = max(one[key] for one in runs.remembered(gradient_errors, ranks))
            right = key in ("experts", "router, summed")
            if (worst < 1e-12) != right:
                raise EvidenceError(f"{key}, {ranks} ranks: {worst}")
            cells.append("none" if right else f"{worst:.2g}")
        rows.append([name, *cells])
    return Table(["", *(f"{ranks} ranks" for ranks in sizes)], rows, "lrr")


@FIGURES
def expert_groups(replicas: int = 2, ranks: int = 8) -> str:
    """The ranks of a mesh with both expert axes, each with the experts that it has."""
    from .runs_dispatch import groups

    found = runs.remembered(groups, ranks, replicas)
    check_groups(found, replicas, ranks)
    left, top, high = 92.0, 40.0, 62.0
    wide = (WIDTH - left - 4) / (ranks // replicas)
    parts = [text(left, 14, "expert: other experts, other tokens", "xt-label")]
    for one in found:
        data, expert = one["place"]
        x, y = left + wide * expert, top + high * data
        experts = ", ".join(map(str, one["experts"]))
        hover = f"rank {one['rank']}: experts {experts}"
        parts.append(rect(x, y, wide - 6, high - 8, expert, opacity=0.25, hover=hover))
        middle = x + (wide - 6) / 2
        parts.append(text(middle, y + 23, f"rank {one['rank']}", "xt-label", "middle"))
        parts.append(text(middle, y + 42, f"experts {experts}", "xt-label", "middle"))
    for data in range(replicas):
        y = top + high * data + 30
        parts.append(text(4, y, f"expert_data {data}", "xt-tick"))
    for expert in range(ranks // replicas):
        middle = left + wide * expert + (wide - 6) / 2
        parts.append(text(middle, 32, str(expert), "xt-tick", "middle"))
    y = top + high * replicas + 14
    parts.append(
        text(left, y, "one colour: the same experts, whose gradients", "xt-tick")
    )
    parts.append(text(left, y + 17, "are summed over expert_data", "xt-tick"))
    title = f"{ranks} ranks as {replicas} x {ranks // replicas}"
    words = "; ".join(f"rank {o['rank']}: experts {o['experts']}" for o in found)
    return fit(document(WIDTH, int(y + 26), parts, title, words), WIDTH)


def check_groups(found: list[dict[str, Any]], replicas: int, ranks: int) -> None:
    """EvidenceError unless each expert is once in a group, and alike in its copies."""
    from .runs_dispatch import EXPERTS

    for one in found:
        held = sorted(e for r in one["expert"] for e in found[r]["experts"])
        copies = {tuple(found[r]["experts"]) for r in one["expert_data"]}
        sizes = [len(one["expert"]), len(one["expert_data"])]
        if held != list(range(EXPERTS)) or len(copies) != 1:
            raise EvidenceError(f"rank {one['rank']}: {held}, {copies}")
        if sizes != [ranks // replicas, replicas]:
            raise EvidenceError(f"rank {one['rank']}: groups of {sizes}")
