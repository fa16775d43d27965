"""Placement: loads of ranks with experts in order, spread, and with replicas."""

from functools import lru_cache

from xtrain.expert_parallel.expert_placement import ExpertPlacement, plan_placement

from ...amounts import times
from ...figures import REGISTRY
from ...svg import document, line, rect, text
from ...values import value
from .balance import EXPERTS, told

RANKS, SLOTS = 4, (0, 2, 3, 4)
WIDTH, LEFT = 400, 62


@lru_cache
def plan_of(way: str, slots: int) -> ExpertPlacement:
    """For the copies of the last ten steps of the run with top 2; 0 slots: in order."""
    steps = told(way, 2)["loads"][-10:]
    loads = [float(sum(column)) for column in zip(*steps, strict=True)]
    if slots:
        return plan_placement(loads, RANKS, slots)
    each = EXPERTS // RANKS
    table = [tuple(range(e, e + each)) for e in range(0, EXPERTS, each)]
    return ExpertPlacement(tuple(loads), tuple(table), each)


@value
def slowdown(way: str, slots: int) -> float:
    """Load of the busiest rank over the mean."""
    return plan_of(way, slots).slowdown


@value
def experts_to_send(way: str, slots: int) -> int:
    """How many experts ranks get when they leave the order for the plan."""
    return len(plan_of(way, 0).moves(plan_of(way, slots)))


@REGISTRY
def expert_placements(way: str = "none") -> str:
    """Load of each rank as a bar, a piece for each expert; a line at the mean."""
    plans = {slots: plan_of(way, slots) for slots in SLOTS}
    loads = plans[0].loads
    scale = (WIDTH - LEFT - 12) / max(max(p.load_of_rank) for p in plans.values())
    mean = LEFT + sum(loads) / RANKS * scale
    parts, y, words = [], 4.0, []
    for slots, plan in plans.items():
        name = f"planned, {slots} slots a rank" if slots else "experts in order"
        title = f"{name}: {times(plan.slowdown)} the mean"
        parts.append(text(4, y + 14, title, "xt-label"))
        y += 22
        for rank, held in enumerate(plan.experts):
            parts.append(text(LEFT - 8, y + 13, f"rank {rank}", "xt-tick", "end"))
            x = float(LEFT)
            for expert in held:
                part = loads[expert] * plan.share(expert)
                hover = f"rank {rank}, expert {expert}: {part:.0f} copies"
                wide = part * scale
                parts.append(rect(x, y, max(0.5, wide - 1), 17, expert, opacity=0.4,
                                  hover=hover))  # fmt: skip
                if wide > 12:
                    at = beside_line(x, wide, mean)
                    parts.append(text(at, y + 13, str(expert), "xt-label", "middle"))
                x += wide
            y += 20
        parts.append(line(mean, y - 20 * RANKS - 3, mean, y, "xt-mark"))
        words.append(f"{name}: {plan.experts}")
        y += 12
    title = "Copies that each rank computes, by placement"
    return document(WIDTH, y, parts, title, "; ".join(words))


def beside_line(x: float, wide: float, line: float, room: float = 7.0) -> float:
    """Where a piece's number is written: in the middle, unless the line is there."""
    middle = x + wide / 2
    if abs(middle - line) >= room:
        return middle
    left, right = line - room, line + room
    return left if left - x >= x + wide - right else right
