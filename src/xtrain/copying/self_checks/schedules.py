"""Of the schedules: bubbles and actions; no ranks are started."""

import re
import sys
from collections import Counter
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
            sys.exit("WRONG: the schedule deadlocks")
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


def check_chimera(form: Any) -> None:
    """The bubble of the paper, and every stage's work in both directions."""
    orders = form(4, 4)
    show(orders)
    idle, _ = played(orders)
    same("idle time of rank 0, 2(p - 2)F", idle[0], 4.0)
    kinds = Counter(
        kind for order in orders for _, kind, _ in parts_of(" ".join(order))
    )
    same("forwards of 4 stages and 4 micro-batches", kinds["F"], 4 * 4)
    same("backwards", kinds["BW"], 4 * 4)


def check_dualpipe(form: Any) -> None:
    """The bubble of the report, and the gradients of every weight."""
    orders = form(8, 20)
    show(orders)
    idle, _ = played(orders)
    same("idle time of rank 0, (p/2 - 1)(F&B + BW - 3W)", idle[0], 3 * 2.0)
    kinds = Counter(
        kind[0] for order in orders for _, kind, _ in parts_of(" ".join(order))
    )
    same("forwards of 8 stages and 20 micro-batches", kinds["F"], 8 * 20)
    same("gradients of inputs", kinds["B"], 8 * 20)


def check_dualpipe_v(form: Any) -> None:
    """The bubble of DualPipe on 8 ranks, and the gradients of every weight."""
    orders = form(4, 20)
    show(orders)
    idle, _ = played(orders)
    same("idle time of rank 0, (p - 1)(F&B + BW - 3W)", idle[0], 3 * 2.0)
    kinds = Counter(
        kind[0] for order in orders for _, kind, _ in parts_of(" ".join(order))
    )
    same("forwards of 8 stages and 20 micro-batches", kinds["F"], 8 * 20)
    same("gradients of inputs", kinds["B"], 8 * 20)


def check_gpipe(form: Any) -> None:
    """The bubble of 4 ranks, and who holds how much."""
    orders = form(4, 6)
    show(orders)
    idle, actions = played(orders)
    same("forwards and backwards of 4 stages and 6 micro-batches", actions, 4 * 6 * 2)
    same("idle time of rank 0, (p - 1)(F + BW)", idle[0], 3 * 3.0)
    ahead = orders[3].index("3BW0")
    same("micro-batches that wait on the last rank", ahead, 6)


def check_interleaved(form: Any) -> None:
    """The bubble is divided by the chunks."""
    for chunks in (1, 2, 3):
        orders = form(4, 8, chunks)
        idle, actions = played(orders)
        same(f"actions with {chunks} chunks", actions, 4 * chunks * 8 * 2)
        same("idle time, (p - 1)(F + BW) of one chunk", idle[0], 3 * 3.0)
    show(form(2, 4, 2))


def check_one_f_one_b(form: Any) -> None:
    """GPipe's bubble, and fewer micro-batches that wait."""
    orders = form(4, 6)
    show(orders)
    idle, actions = played(orders)
    same("forwards and backwards of 4 stages and 6 micro-batches", actions, 4 * 6 * 2)
    same("idle time of rank 0, (p - 1)(F + BW)", idle[0], 3 * 3.0)
    ahead = [order.index(f"{rank}BW0") for rank, order in enumerate(orders)]
    same("micro-batches that wait, p - r", ahead, [4, 3, 2, 1])


def check_simulate(form: Any) -> None:
    """A staircase worked out by hand, and a schedule that cannot be."""
    one = [[f"{s}F0", f"{s}BW0"] for s in range(4)]
    for rank, placed in enumerate(form(one)):
        same(f"rank {rank} begins its forward", placed[0][1], float(rank))
        same(f"rank {rank} begins its backward", placed[1][1], 4.0 + 2 * (3 - rank))
    late = form([["0F0", "0B0", "0W0"], ["1F0", "1B0", "1W0"]], 1, 2, 3, p2p=0.5)
    same("a message delays who waits for it", late[1][0], ("1F0", 1.5, 2.5))
    same("and again on the way back", late[0][1], ("0B0", 5.0, 7.0))
    same("the weights' part follows at once", late[0][2], ("0W0", 7.0, 10.0))
    pair = form([["0F0", "0F1&0BW0", "0BW1"]])[0][1]
    same("a pair takes as long as both", pair, ("0F1&0BW0", 1.0, 4.0))
    try:
        form([["0BW0", "0F0"], ["1F0", "1BW0"]])
    except ValueError as error:
        same("a backward before its forward", str(error), "the schedule deadlocks")


def check_zb_h1(form: Any) -> None:
    """A third of 1F1B's bubble, in the same memory."""
    orders = form(4, 8)
    show(orders)
    idle, actions = played(orders)
    same("F, B and W of 4 stages and 8 micro-batches", actions, 4 * 8 * 3)
    same("idle time of rank 0, (p - 1)(F + B - W)", idle[0], 3 * 1.0)
    ahead = [order.index(f"{rank}B0") for rank, order in enumerate(orders)]
    same("micro-batches that wait, p - r", ahead, [4, 3, 2, 1])
    few = " ".join(form(4, 2)[1])
    same("W begins once no forward is left", few, "1F0 1F1 1B0 1W0 1B1 1W1")


def check_zb_h2(form: Any) -> None:
    """No rank is idle if F = B = W; about twice as many micro-batches wait."""
    orders = form(4, 10)
    show(orders)
    idle, actions = played(orders)
    same("F, B and W of 4 stages and 10 micro-batches", actions, 4 * 10 * 3)
    same("idle time of all ranks, (p - 1)(F + B - 2W)", idle, [0.0] * 4)
    ahead = [order.index(f"{rank}B0") for rank, order in enumerate(orders)]
    same("micro-batches that wait, 2(p - r) - 1", ahead, [7, 5, 3, 1])


def waiting(order: list[str]) -> int:
    """The most stages' micro-batches that are between F and W."""
    most = now = 0
    for _, kind, _ in parts_of(" ".join(order)):
        now += {"F": 1, "B": 0, "W": -1}[kind]
        most = max(most, now)
    return most


def check_zb_v(form: Any) -> None:
    """No rank is idle if F = B = W, and no more waits than in 1F1B."""
    orders = form(4, 8)
    show(orders)
    idle, actions = played(orders)
    same("F, B and W of 8 stages and 8 micro-batches", actions, 8 * 8 * 3)
    same("idle time of all ranks", idle, [0.0] * 4)
    most = [waiting(order) for order in orders]
    same("of half a rank's layers, micro-batches that wait: 2p", most, [8] * 4)
