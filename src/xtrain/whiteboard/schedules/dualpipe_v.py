"""DualPipeV: DualPipe cut at its middle; two stages a rank, down the ranks and up.

    stage  0  1  2  3  4  5  6  7        0F4&7B1 is an overlapped pair: a forward on
    rank   0  1  2  3  3  2  1  0        its way down, a backward on its way there

Computes:   for each rank the order of F, BW, pairs, B (input) and W (weights).
Sends:      activations and gradients to both neighbours; every weight is there once.
Leaves out: checks: at least two micro-batches for each rank.
"""

from itertools import count


def dualpipe_v(ranks: int, micro_batches: int) -> list[list[str]]:
    """DualPipe's order on twice the ranks, of which each holds a pair of mirrors."""
    return [_of_rank(rank, ranks, micro_batches) for rank in range(ranks)]


class _Direction:
    """The micro-batches that pass this rank one way, through one of its stages."""

    def __init__(self, stage: int):
        self.stage, self.forwards, self.backwards = stage, count(), count()

    def forward(self) -> str:
        return f"{self.stage}F{next(self.forwards)}"

    def backward(self, kind: str = "BW") -> str:
        return f"{self.stage}{kind}{next(self.backwards)}"


def _pair(one: _Direction, other: _Direction) -> str:
    return f"{one.forward()}&{other.backward('B')}"  # each hides the other's messages


def _of_rank(rank: int, ranks: int, micro_batches: int) -> list[str]:
    near, far = _Direction(rank), _Direction(2 * ranks - 1 - rank)
    depth, inner = rank, ranks - 1 - rank  # ranks from here to the end, to the turn
    order, waiting = list[str](), list[str]()  # what is done; W that are put off

    def backward_input(direction: _Direction) -> None:
        order.append(direction.backward("B"))
        waiting.append(order[-1].replace("B", "W"))

    for _ in range(2 * inner):  # 1. forwards on the way down
        order.append(near.forward())
    for _ in range(depth + 1):  # 2. forwards of both directions
        order += [near.forward(), far.forward()]
    for _ in range(inner):  # 3. B, for which the rank before waits; then W, then F
        backward_input(far)
        order += [waiting.pop(0), far.forward()]
    if inner == 0:  # where it turns: the first output leaves sooner
        order += [near.forward(), far.backward(), _pair(far, near)]
    else:
        order += [_pair(near, far), _pair(far, near)]
    for _ in range(micro_batches - 2 * ranks + depth):  # 4. pairs, most of the time
        order += [_pair(near, far), _pair(far, near)]
    for _ in range(inner):  # 5. no forwards of near are left
        order += [far.backward(), _pair(far, near)]
    for i in range(2 * (depth + 1)):  # 6. backwards of both; from half on, B only
        direction = near if i % 2 else far
        if i <= depth:
            order.append(direction.backward())
        else:
            backward_input(direction)
    for _ in range(inner):  # 7. a W while the next gradient is on its way
        order.append(waiting.pop(0))
        backward_input(near)
    order += waiting  # 8. what was put off
    return order
