"""One forward and one backward of a block with experts: which order can be run.

    forward     attention - dispatch - MLP - combine
    backward    MLP's input and weights wait for the gradient of combine, ...

Dispatch and combine are exchanges (all-to-all); their gradients are exchanges, too.
"""

from typing import NamedTuple

from ...evidence import EvidenceError
from ...tables import REGISTRY, Table
from ...values import value

FORWARD = ("attention", "dispatch", "MLP", "combine")
EXCHANGES = ("dispatch", "combine")


class Part(NamedTuple):
    """A part of the block, of one micro-batch: F, or B for its gradient."""

    kind: str
    part: str
    micro_batch: int

    def __str__(self) -> str:
        return f"{self.kind}({self.part}) of {self.micro_batch}"


def before(part: Part) -> Part | None:
    """What has to be done first."""
    at = FORWARD.index(part.part) + (-1 if part.kind == "F" else 1)
    if not 0 <= at < len(FORWARD):
        return None
    return part._replace(part=FORWARD[at])


Slots = tuple[tuple[Part, ...], ...]
NOTES: Slots = (
    (Part("F", "MLP", 1),),
    (Part("B", "attention", 0),),
    (Part("F", "attention", 1),),
    (Part("B", "MLP", 0),),
)
"""As the original notes list it, one after the other; exchanges in between."""
PAIR: Slots = (
    (Part("F", "attention", 1), Part("B", "combine", 0)),
    (Part("B", "MLP", 0), Part("F", "dispatch", 1)),
    (Part("F", "MLP", 1), Part("B", "dispatch", 0)),
    (Part("B", "attention", 0), Part("F", "combine", 1)),
)
"""A computation, and the exchange that runs under it."""
TWO_FORWARDS: Slots = (
    (Part("F", "attention", 0),),
    (Part("F", "attention", 1), Part("F", "dispatch", 0)),
    (Part("F", "MLP", 0), Part("F", "dispatch", 1)),
    (Part("F", "MLP", 1), Part("F", "combine", 0)),
    (Part("F", "combine", 1),),
)
TWO_BACKWARDS: Slots = (
    (Part("B", "combine", 0),),
    (Part("B", "MLP", 0), Part("B", "combine", 1)),
    (Part("B", "MLP", 1), Part("B", "dispatch", 0)),
    (Part("B", "attention", 0), Part("B", "dispatch", 1)),
    (Part("B", "attention", 1),),
)


def too_early(slots: Slots) -> list[str]:
    """Parts that come before what they need, or in the same slot.

    An exchange that the order does not list is taken as done with its computation.
    """
    slot_of = {part: i for i, slot in enumerate(slots) for part in slot}
    problems = []
    for part, slot in slot_of.items():
        needed = before(part)
        if needed is not None and needed not in slot_of:
            needed = before(needed)
        if needed in slot_of and slot_of[needed] >= slot:
            problems.append(f"{part} needs {needed}")
    return problems


def exposed(slots: Slots, computation: float, exchange: float) -> float:
    """How long the slots take beyond their computations."""
    time = sum(
        max(sum(computation for p in slot if p.part not in EXCHANGES),
            sum(exchange for p in slot if p.part in EXCHANGES))
        for slot in slots
    )  # fmt: skip
    parts = [p for slot in slots for p in slot if p.part not in EXCHANGES]
    return time - computation * len(parts)


ORDERS = {"pair": PAIR, "two_forwards": TWO_FORWARDS, "two_backwards": TWO_BACKWARDS}


@value
def units_of_pair(order: str = "pair", in_turn: bool = False) -> float:
    """How long two micro-batches take if each part, also an exchange, takes 1."""
    slots = ORDERS[order]
    parts = [part for slot in slots for part in slot]
    if in_turn:
        return float(len(parts))
    computed = sum(part.part not in EXCHANGES for part in parts)
    return computed + exposed(slots, 1.0, 1.0)


@REGISTRY
def order_of_a_pair(order: str = "pair") -> Table:
    """The computations of two micro-batches, and the exchange under each of them."""
    slots = ORDERS[order]
    if too_early(slots):
        raise EvidenceError(f"{order}: {'; '.join(too_early(slots))}")
    rows = []
    for slot in slots:
        computed = [str(p) for p in slot if p.part not in EXCHANGES]
        exchanged = [str(p) for p in slot if p.part in EXCHANGES]
        rows.append([*(computed or [""]), *(exchanged or [""])])
    return Table(["computed", "exchanged at the same time"], rows, "ll")
