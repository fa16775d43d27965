"""Loads of ranks for experts in order, spread, and with replicas: planned, drawn."""

from typing import Any

from ... import runs
from ...evidence import EvidenceError
from ...figures import REGISTRY as FIGURES
from ...svg import document, fit, line, rect, text
from ...tables import REGISTRY as TABLES
from ...tables import Table
from ...values import times
from .balance import NAMES

SLOTS = [2, 3, 4]
WIDTH, LEFT = 400, 62


def told(way: str, top_k: int = 2) -> list[dict[str, Any]]:
    """The plans; EvidenceError unless every copy has a rank and slowdowns are right."""
    from .runs_placement import RANKS, placements

    found = runs.remembered(placements, 1, way, top_k, SLOTS)[0]
    for plan in found:
        by_expert = [0.0] * len(plan["loads"])
        for held, parts in zip(plan["experts"], plan["parts"], strict=True):
            for expert, part in zip(held, parts, strict=True):
                by_expert[expert] += part
        pairs = zip(by_expert, plan["loads"], strict=True)
        ranks = [sum(parts) for parts in plan["parts"]]
        slowdown = max(ranks) * RANKS / sum(ranks)
        if (
            any(abs(ours - load) > 1e-6 for ours, load in pairs)
            or abs(slowdown - plan["slowdown"]) > 1e-9
        ):
            raise EvidenceError(f"{way}: loads {by_expert}, slowdown {slowdown}")
    return found


def names() -> list[str]:
    """What each plan is called."""
    return ["experts in order", *(f"planned, {slots} slots a rank" for slots in SLOTS)]


@FIGURES
def expert_placements(way: str = "none", top_k: int = 2) -> str:
    """Load of each rank as a bar, a piece for each expert; a line at the mean."""
    found = told(way, top_k)
    total = sum(found[0]["loads"])
    ranks = len(found[0]["experts"])
    longest = max(sum(parts) for plan in found for parts in plan["parts"])
    scale = (WIDTH - LEFT - 12) / longest
    mean = LEFT + total / ranks * scale
    parts, y, words = [], 4.0, []
    for name, plan in zip(names(), found, strict=True):
        title = f"{name}: {times(plan['slowdown'])} the mean"
        parts.append(text(4, y + 14, title, "xt-label"))
        y += 22
        for rank, held in enumerate(plan["experts"]):
            parts.append(text(LEFT - 8, y + 13, f"rank {rank}", "xt-tick", "end"))
            x = float(LEFT)
            for expert, part in zip(held, plan["parts"][rank], strict=True):
                hover = f"rank {rank}, expert {expert}: {part:.0f} copies"
                wide = part * scale
                parts.append(rect(x, y, max(0.5, wide - 1), 17, expert, opacity=0.4,
                                  hover=hover))  # fmt: skip
                if wide > 12:
                    at = beside_line(x, wide, mean)
                    parts.append(text(at, y + 13, str(expert), "xt-label", "middle"))
                x += wide
            y += 20
        parts.append(line(mean, y - 20 * ranks - 3, mean, y, "xt-mark"))
        words.append(f"{name}: {plan['experts']}")
        y += 12
    title = "Copies that each rank computes, by placement"
    return fit(document(WIDTH, int(y), parts, title, "; ".join(words)), WIDTH)


def beside_line(x: float, wide: float, line: float, room: float = 7.0) -> float:
    """Where a piece's number stands: in the middle, unless the line runs there."""
    middle = x + wide / 2
    if abs(middle - line) >= room:
        return middle
    left, right = line - room, line + room
    return left if left - x >= x + wide - right else right


@TABLES
def placement_slowdowns(top_k: int = 2) -> Table:
    """The busiest rank over the mean, for layers with and without balancing."""
    every = {way: told(way, top_k) for way in NAMES}
    rows = []
    for index, name in enumerate(names()):
        plans = [every[way][index] for way in NAMES]
        rows.append([
            name, *(times(plan["slowdown"]) for plan in plans),
            str(plans[0]["moves"]),
        ])  # fmt: skip
    header = ["", *NAMES.values(), "experts to send, first column"]
    return Table(header, rows, "lrrrr")
