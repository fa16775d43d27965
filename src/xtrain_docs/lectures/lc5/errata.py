"""The errata and the questions of lecture 5: exchanges of experts, and pairs."""

from typing import NamedTuple

from ...tables import REGISTRY, Table
from ...values import value
from .common import played

# --- E74: the exchanges of experts


@value
def waited(name: str, ranks: int, micro_batches: int, exchange: float) -> float:
    """How much longer rank 0 is busy because of the experts' exchanges."""
    with_them = played(name, ranks, micro_batches, all_to_all=exchange)
    return with_them.works[0] - played(name, ranks, micro_batches).works[0]


# --- E73: a forward and a backward of a block with experts, and orders of their parts

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


def slots(order: str) -> Slots:
    """Slots, one after the other, of a computation and the exchange that runs under it.

    `F MLP 1 + B dispatch 0 | ...`
    """
    parts = [[p.split() for p in slot.split("+")] for slot in order.split("|")]
    return tuple(tuple(Part(k, p, int(i)) for k, p, i in slot) for slot in parts)


ORDERS = {
    "pair": slots(
        "F attention 1 + B combine 0 | B MLP 0 + F dispatch 1 | "
        "F MLP 1 + B dispatch 0 | B attention 0 + F combine 1"
    ),
    "two_forwards": slots(
        "F attention 0 | F attention 1 + F dispatch 0 | F MLP 0 + F dispatch 1 | "
        "F MLP 1 + F combine 0 | F combine 1"
    ),
    "two_backwards": slots(
        "B combine 0 | B MLP 0 + B combine 1 | B MLP 1 + B dispatch 0 | "
        "B attention 0 + B dispatch 1 | B attention 1"
    ),
}


@value
def units_of_pair(order: str = "pair", in_turn: bool = False) -> int:
    """How long two micro-batches take if each part, also an exchange, takes 1."""
    return sum(len(slot) if in_turn else 1 for slot in ORDERS[order])


@REGISTRY
def order_of_a_pair(order: str = "pair") -> Table:
    """The computations of two micro-batches, and the exchange under each of them."""
    rows = []
    for slot in ORDERS[order]:
        computed = [str(p) for p in slot if p.part not in EXCHANGES]
        exchanged = [str(p) for p in slot if p.part in EXCHANGES]
        rows.append([*(computed or [""]), *(exchanged or [""])])
    return Table(["computed", "exchanged at the same time"], rows, "ll")
