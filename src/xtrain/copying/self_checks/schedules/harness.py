"""Plays an order of actions on its own, and compares; no ranks are started."""

import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

PARTS = re.compile(r"(\d+)([FBW]+)(\d+)")


def played(orders: list[list[str]], backward: float = 2.0) -> tuple[list[float], int]:
    """Idle time of every rank if F takes 1 and BW `backward`; and actions in all.

    Time goes forward in steps of a half: a rank that is free begins its next action
    once everything that this needs has ended.
    """
    stages = 1 + max(
        int(n) for order in orders for n, _, _ in parts_of(" ".join(order))
    )
    ends: dict[tuple[str, int, str], float] = {}
    at, free = [0] * len(orders), [0.0] * len(orders)
    first: dict[int, float] = {}
    work, now = [0.0] * len(orders), 0.0
    while any(at[r] < len(order) for r, order in enumerate(orders)):
        for rank, order in enumerate(orders):
            if at[rank] == len(order) or free[rank] > now:
                continue
            parts = parts_of(order[at[rank]])
            needs = [need for part in parts for need in needs_of(part, stages)]
            if any(ends.get(need, now + 1) > now for need in needs):
                continue
            lasts = sum(duration(kind, len(parts), backward) for _, kind, _ in parts)
            first.setdefault(rank, now)
            at[rank], free[rank] = at[rank] + 1, now + lasts
            work[rank] += lasts
            for stage, kind, i in parts:
                ends[kind[0], int(stage), i] = now + lasts
        now += 0.5
        if now > 10_000:
            sys.exit("WRONG: the schedule waits for itself")
    idle = [free[r] - first[r] - work[r] for r in range(len(orders))]
    return idle, sum(map(len, orders))


def parts_of(text: str) -> list[tuple[str, str, str]]:
    """(stage, kind, micro-batch) of every part of one or more actions."""
    return PARTS.findall(text)


def duration(kind: str, parts: int, backward: float) -> float:
    """F takes 1; B and W share a backward's time; in a pair B is the whole backward."""
    if kind in ("B", "W") and parts == 1:
        return backward / 2
    return 1.0 if kind == "F" else backward


def needs_of(part: tuple[str, str, str], stages: int) -> Iterable[tuple[str, int, str]]:
    """What must have ended before this begins."""
    stage, kind, i = int(part[0]), part[1], part[2]
    if kind == "F":
        return [("F", stage - 1, i)] if stage else []
    if kind == "W":
        return [("B", stage, i)]
    return [("F", stage, i)] + [("B", stage + 1, i)] * (stage + 1 < stages)


def same(what: str, actual: object, expected: object) -> None:
    """Stop unless both are equal."""
    if actual != expected:
        sys.exit(f"WRONG: {what}: {actual}, not {expected}")
    print(f"right: {what}: {actual}")


def show(orders: list[list[str]]) -> None:
    """Print what every rank does."""
    for rank, order in enumerate(orders):
        print(f"rank {rank}: {' '.join(order)}")


def run(check: Callable[[Any], None], form: Any) -> None:
    """Compare, here and now."""
    check(form)
