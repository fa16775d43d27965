"""Zero bubble: the gradients of weights wait, and fill the time others leave idle.

Backward is two computations. B, the gradient of a stage's input, is what the rank
before waits for. W, the gradients of its weights, is needed by the optimizer only. 1F1B
does both at once; here W is put off to where the rank would wait otherwise.

                idle per rank          activations of rank r, until B      until W
    1F1B        (p - 1)(F + B + W)     p - r                               p - r
    ZB-H1       (p - 1)(F + B - W)     p - r                               p
    ZB-H2       (p - 1)(F + B - 2W)    2(p - r) - 1                        2p - 1
    ZB-V        0 if F = B = W         p, two stages a rank, down and up   p

A negative form is none: ZB-H2 never waits if B <= F and F + B <= 2W.

Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, and Pipeline Parallelism
with Controllable Memory, NeurIPS 2024 (ZB-V).
"""

from collections import Counter

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import check_sizes


def zb_h1(ranks: int, micro_batches: int) -> Schedule:
    """1F1B's order, with W put off by as many micro-batches as the rank's number."""
    check_sizes("zb_h1", ranks, micro_batches)
    actions = tuple(
        _handmade(rank, micro_batches, ranks - rank, rank) for rank in range(ranks)
    )
    return Schedule("zb_h1", ranks, micro_batches, 1, "loop", actions)


def zb_h2(ranks: int, micro_batches: int) -> Schedule:
    """More forwards at the start, so that no rank ever waits if F = B = W."""
    check_sizes("zb_h2", ranks, micro_batches)
    actions = tuple(
        _handmade(rank, micro_batches, 2 * (ranks - rank) - 1, 2 * rank)
        for rank in range(ranks)
    )
    return Schedule("zb_h2", ranks, micro_batches, 1, "loop", actions)


def zb_v(ranks: int, micro_batches: int) -> Schedule:
    """Two stages a rank, down the ranks and back up: no bubble in 1F1B's memory.

    The last rank turns around at once, so its first backward begins early, and every
    rank holds a late stage, whose activations leave soon, beside an early one.
    """
    check_sizes("zb_v", ranks, micro_batches)
    actions = tuple(_v_shaped(rank, ranks, micro_batches) for rank in range(ranks))
    return Schedule("zb_v", ranks, micro_batches, 2, "v", actions)


def _handmade(rank: int, micro_batches: int, ahead: int, put_off: int) -> list[Action]:
    """Forwards `ahead`, then B, W, F in turn, W of `put_off` micro-batches before."""
    ahead = min(ahead, micro_batches)
    actions = [Action("F", rank, i) for i in range(ahead)]
    weights = 0
    for i in range(micro_batches):
        actions.append(Action("B", rank, i))
        # with no forward left to do, W is what there is to do while B is on its way
        if i >= put_off or i + ahead >= micro_batches:
            actions.append(Action("W", rank, weights))
            weights += 1
        if i + ahead < micro_batches:
            actions.append(Action("F", rank, i + ahead))
    return actions + [Action("W", rank, i) for i in range(weights, micro_batches)]


def _v_shaped(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    """The order for at least 2p - 1 micro-batches, without those that there are not."""
    enough = max(2 * ranks - 1, micro_batches)
    down, up = rank, 2 * ranks - 1 - rank
    done = Counter[tuple[str, int]]()
    actions: list[Action] = []

    def do(*steps: tuple[str, int]) -> None:
        for kind, stage in steps:
            actions.append(Action(kind, stage, done[kind, stage]))
            done[kind, stage] += 1

    for _ in range(2 * (ranks - rank) - 1):
        do(("F", down))
    for _ in range(rank):
        do(("F", up), ("F", down))
    for _ in range(ranks - rank):
        do(("F", up), ("B", up), ("W", up))
    while done["F", up] < enough:
        if done["F", down] < enough:
            do(("F", down))
        do(("B", down), ("W", down), ("F", up), ("B", up), ("W", up))
    for _ in range(rank):
        do(("B", down), ("B", up))
    for _ in range(ranks - rank):
        do(("B", down), ("W", down))
    for stage in (up, down):
        while done["W", stage] < enough:
            do(("W", stage))
    return [action for action in actions if action.micro_batch < micro_batches]
