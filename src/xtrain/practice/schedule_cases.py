"""Schedules at many sizes, beside those of the whiteboard form.

Every pass of every stage once, no deadlock, no rank idle for longer, and no rank with
more micro-batches alive: another order may be as good.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import chain, product
from typing import Any

from xtrain.copying.self_checks.schedules import parts_of, played
from xtrain.practice.outcomes import Noted

RANKS, MICRO_BATCHES = (1, 2, 3, 4), (1, 2, 3, 4, 6, 8)


def beside(form: Any, best: Any, name: str, simulate: Any) -> Iterator[Noted]:
    """Of each size that the whiteboard form takes."""
    chunks: tuple[tuple[int, ...], ...] = (
        ((1,), (2,)) if name == "interleaved" else ((),)
    )
    for ranks, count, more in product(RANKS, MICRO_BATCHES, chunks):
        try:
            orders = best(ranks, count, *more)
            simulate(orders)
            wanted = facts(orders)
        except (Exception, SystemExit):
            continue  # not a size for this schedule
        what = f"{ranks} ranks, {count} micro-batches"
        what += f", {more[0]} chunks" if more else ""
        if set(wanted[0].values()) != {1}:
            continue
        found = facts(form(ranks, count, *more))
        problem = difference(found, wanted)
        digest = tuple(map(float, [*found[1], *found[2]]))
        yield Noted(what, not problem, f"{what}: {problem}", digest)


Facts = tuple[Counter[str], list[float], list[int]]


def facts(orders: list[list[str]]) -> Facts:
    """How often each pass runs, idle time of each rank, most that wait there."""
    passes: Counter[str] = Counter()
    for stage, kinds, i in parts_of(" ".join(" ".join(order) for order in orders)):
        passes.update(f"{stage}{kind}{i}" for kind in kinds)
    idle, _ = played([list(order) for order in orders])
    return passes, idle, [alive(order) for order in orders]


def alive(order: list[str]) -> int:
    """The most stages' micro-batches between a forward and its last backward."""
    most = now = 0
    split = any(kind == "W" for _, kind, _ in parts_of(" ".join(order)))
    for _, kinds, _ in parts_of(" ".join(order)):
        now += kinds == "F"
        most = max(most, now)
        now -= "W" in kinds or (not split and kinds == "B")
    return most


def difference(found: Facts, wanted: Facts) -> str:
    """What is worse, in words; empty if nothing is."""
    missing, extra = wanted[0] - found[0], found[0] - wanted[0]
    if missing or extra:
        parts = [f"{next(iter(missing))} is missing"] * bool(missing)
        parts += [f"{next(iter(extra))} is there once too often"] * bool(extra)
        return " and ".join(parts)
    if max(found[1]) > max(wanted[1]) + 1e-9:
        return f"a rank is idle for {max(found[1]):g}, where {max(wanted[1]):g} suffice"
    for rank, (mine, least) in enumerate(zip(found[2], wanted[2], strict=True)):
        if mine > least:
            return (
                f"rank {rank} has {mine} micro-batches alive at once, where {least} "
                f"suffice"
            )
    return ""


def simulated(
    form: Any, best: Any, orders: dict[str, Callable[..., Any]]
) -> Iterator[Noted]:
    """Times of some schedules, with unequal passes and messages that take time."""
    for name, order in orders.items():
        for times in ((1, 1, 1, None, 0.0), (1, 2, 3, 5, 0.5)):
            forward, back, weight, pair, p2p = times
            given = {"overlapped": pair, "p2p": p2p}
            found = form(order(4, 8), forward, back, weight, **given)
            wanted = best(order(4, 8), forward, back, weight, **given)
            what = f"{name} on 4 ranks, times {times}"
            pairs = zip(chain(*found), chain(*wanted), strict=True)
            wrong = (f"{a} instead of {b}" for a, b in pairs if tuple(a) != tuple(b))
            off = next(wrong, "")
            yield Noted(what, not off, f"{what}: {off}")
    stuck = [["1F0", "0F0", "1BW0", "0BW0"]]
    try:
        form(stuck)
        yield Noted("a deadlock", False, f"{stuck} deadlocks: raise ValueError")
    except ValueError:
        yield Noted("a deadlock", True)
