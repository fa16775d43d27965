"""DualPipe: micro-batches enter at both ends; a forward hides a backward's messages.

    0F4&3B1 is an overlapped pair; micro-batches from m/2 on travel the other way

Computes:   for each rank the order of F, BW, pairs, B (input) and W (weights).
Sends:      activations and gradients to both neighbours, each stage being there twice.
Leaves out: checks: ranks even, m even and at least twice the ranks.
"""

from itertools import count


def dualpipe(ranks: int, micro_batches: int) -> list[list[str]]:
    """Idle (p/2 - 1)(F&B + BW - 3W); p + 1 activations, two copies of the weights."""
    return [_of_rank(rank, ranks, micro_batches // 2) for rank in range(ranks)]


class _Direction:
    """The micro-batches that pass this rank one way, through one of its stages."""

    def __init__(self, stage: int, first: int):
        self.stage, self.forwards, self.backwards = stage, count(first), count(first)

    def forward(self) -> str:
        return f"{self.stage}F{next(self.forwards)}"

    def backward(self, kind: str = "BW") -> str:
        return f"{self.stage}{kind}{next(self.backwards)}"


def _pair(one: _Direction, other: _Direction) -> str:
    return f"{one.forward()}&{other.backward('B')}"  # each hides the other's messages


def _of_rank(rank: int, ranks: int, half: int) -> list[str]:
    mirror = ranks - 1 - rank
    near, far = _Direction(rank, 0), _Direction(mirror, half)
    if rank > mirror:
        near, far = far, near  # near is the direction that enters at the nearer end
    depth = min(rank, mirror)  # ranks from here to that end
    inner = ranks // 2 - 1 - depth  # ranks from here to the middle
    order, waiting = list[str](), list[str]()  # what is done; W that are put off

    def backward_input(direction: _Direction) -> None:
        order.append(direction.backward("B"))
        waiting.append(order[-1].replace("B", "W"))

    for _ in range(2 * inner):  # 1. forwards from the nearer end
        order.append(near.forward())
    for _ in range(depth + 1):  # 2. forwards of both directions
        order += [near.forward(), far.forward()]
    for _ in range(inner):  # 3. B, for which the rank before waits; then W, then F
        backward_input(far)
        order += [waiting.pop(0), far.forward()]
    if inner == 0:  # in the middle: the first output leaves sooner
        order += [near.forward(), far.backward(), _pair(far, near)]
    else:
        order += [_pair(near, far), _pair(far, near)]
    for _ in range(half - ranks + depth):  # 4. pairs, most of the time
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
