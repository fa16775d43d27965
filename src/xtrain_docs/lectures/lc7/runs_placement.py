"""Placements planned for the loads of the small trained layer."""

from typing import Any

from xtrain.expert_parallel.placement import ExpertPlacement, plan_placement

from .runs_training import EXPERTS, SEED, trained

RANKS = 4


def loads_of(way: str, top_k: int) -> list[float]:
    """Copies of each expert in the last ten steps of the run."""
    steps = trained(way, top_k, SEED)[1]["loads"][-10:]
    return [float(sum(column)) for column in zip(*steps, strict=True)]


def placements(way: str, top_k: int, slots: list[int]) -> list[dict[str, Any]]:
    """The experts in their order, then planned with so many slots on a rank."""
    loads = loads_of(way, top_k)
    each = EXPERTS // RANKS
    table = tuple(
        tuple(range(first, first + each)) for first in range(0, EXPERTS, each)
    )
    in_order = ExpertPlacement(tuple(loads), table, each)
    plans = [in_order, *(plan_placement(loads, RANKS, count) for count in slots)]
    return [
        {
            "experts": plan.experts,
            "parts": [
                [plan.loads[e] * plan.share(e) for e in held] for held in plan.experts
            ],
            "slowdown": plan.slowdown,
            "moves": len(in_order.moves(plan)),
            "loads": loads,
        }
        for plan in plans
    ]
