"""DualPipe: micro-batches enter at both ends, and each rank overlaps one of each.

Every rank holds a stage and its mirror image, so micro-batches of both directions meet
on it. A forward of one and a backward of the other are computed as an overlapped pair:
while one computes, the other's experts exchange tokens.

    rank 0     F0 F0 F0 F0 ...   F0&B1 F1&B0 ...   B1 B0 ...  W
    rank 1        F0 F0 F1 ...   F0&B1 F1&B0 ...   B1 B0 ...  W      phase 0: the
    rank 2        F0 F0 F1 ...                                       direction that
    rank 3     F0 F0 F0 F0 ...                                       enters nearer

Idle: (P/2 - 1)(F&B + BW - 3W) on P ranks; P + 1 activations; every weight twice, whose
gradients the two mirrored ranks add up.

Micro-batches 0 to m/2 - 1 go from rank 0 to P - 1; m/2 to m - 1 the other way, through
the same stages on the mirrored ranks. `dualpipe_v` cuts the picture at the middle:
p = P / 2 ranks, each with stages r and 2p - 1 - r, and every weight once.

Source: DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1 and the DualPipe
repository that belongs to it, whose order this is.
"""

from collections.abc import Callable

from xtrain.schedules.action import Action, Schedule
from xtrain.schedules.checks import (
    check_even_ranks,
    check_least,
    check_multiple,
    check_sizes,
)


def dualpipe(ranks: int, micro_batches: int) -> Schedule:
    """Both directions, overlapped pairs, and weight gradients in what is left idle."""
    return _two_ways("dualpipe", ranks, micro_batches, split=True)


def dualpipe_simple(ranks: int, micro_batches: int) -> Schedule:
    """DualPipe's order with full backwards only, W not split off."""
    return _two_ways("dualpipe_simple", ranks, micro_batches, split=False)


def dualpipe_v(ranks: int, micro_batches: int) -> Schedule:
    """DualPipe cut at its middle: two stages a rank, down the ranks and back up."""
    check_sizes("dualpipe_v", ranks, micro_batches)
    why = f"the overlap begins when {2 * ranks} stages are filled"
    check_least("dualpipe_v", micro_batches, 2 * ranks, why)
    actions = []
    for rank in range(ranks):
        order = _Order((rank, 2 * ranks - 1 - rank), (0, 0), split=True)
        main = micro_batches - 2 * ranks + rank + 1
        actions.append(_eight_steps(order, ranks, rank, main))
    return Schedule("dualpipe_v", ranks, micro_batches, 2, "v", tuple(actions))


def _two_ways(name: str, ranks: int, micro_batches: int, split: bool) -> Schedule:
    check_sizes(name, ranks, micro_batches)
    check_even_ranks(name, ranks)
    check_multiple(name, micro_batches, 2, "half of them enter at each end")
    why = f"the overlap begins when both directions fill {ranks} ranks"
    check_least(name, micro_batches, 2 * ranks, why)
    half, actions = micro_batches // 2, []
    for rank in range(ranks):
        depth = min(rank, ranks - 1 - rank)
        sides = [(rank, 0), (ranks - 1 - rank, half)]  # stage, first micro-batch
        if rank >= ranks // 2:
            sides.reverse()  # phase 0 is the direction that enters at the nearer end
        stages, firsts = zip(*sides, strict=True)
        order = _Order(stages, firsts, split)
        main = half - ranks + depth + 1
        actions.append(_eight_steps(order, ranks // 2, depth, main))
    return Schedule(name, ranks, micro_batches, 1, "mirror", tuple(actions))


class _Order:
    """Writes actions down, and numbers the micro-batches of both phases."""

    def __init__(self, stages: tuple[int, ...], firsts: tuple[int, ...], split: bool):
        self.stages, self.split = stages, split
        self.forwards, self.backwards = list(firsts), list(firsts)
        self.put_off: list[Action] = []
        self.actions: list[Action] = []

    def forward(self, phase: int) -> None:
        self.actions.append(self._next("F", phase, self.forwards))

    def backward(self, phase: int, put_off: bool = False) -> None:
        """Full, or its input part only, the weights' part being put off."""
        put_off = put_off and self.split
        action = self._next("B" if put_off else "BW", phase, self.backwards)
        self.actions.append(action)
        if put_off:
            self.put_off.append(action._replace(kind="W"))

    def weights(self) -> None:
        """The weights' part that has waited longest."""
        if self.split:
            self.actions.append(self.put_off.pop(0))

    def pair(self, phase: int) -> None:
        """The forward of one phase with a backward of the other under it."""
        under = self._next("BW", 1 - phase, self.backwards)
        forward = self._next("F", phase, self.forwards)
        self.actions.append(forward._replace(under=under))

    def _next(self, kind: str, phase: int, counts: list[int]) -> Action:
        counts[phase] += 1
        return Action(kind, self.stages[phase], counts[phase] - 1)


def _eight_steps(order: _Order, half: int, depth: int, main: int) -> list[Action]:
    """The order of the rank that is `depth` away from its end, of `half` ranks.

    Args:
        main: how often step 4, the overlapped part, is done.
    """
    ahead = half - depth - 1  # ranks between this one and the middle
    forward, backward, weights = order.forward, order.backward, order.weights

    def repeat(times: int, *steps: Callable[[], None]) -> None:
        for _ in range(times):
            for step in steps:
                step()

    repeat(2 * ahead, lambda: forward(0))  # 1
    repeat(depth + 1, lambda: forward(0), lambda: forward(1))  # 2
    repeat(ahead, lambda: backward(1, put_off=True), weights, lambda: forward(1))  # 3
    for i in range(main):  # 4
        if i == 0 and ahead == 0:  # in the middle: the output leaves sooner
            forward(0)
            backward(1)
        else:
            order.pair(0)
        order.pair(1)
    repeat(ahead, lambda: backward(1), lambda: order.pair(1))  # 5
    for i in range(2 * (depth + 1)):  # 6: the second half without the weights' part
        backward(1 - i % 2, put_off=i > depth)
    repeat(ahead, weights, lambda: backward(0, put_off=True))  # 7
    repeat(depth + 1, weights)  # 8
    return order.actions
