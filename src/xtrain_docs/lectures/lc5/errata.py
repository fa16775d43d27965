"""The errata and the questions of lecture 5: sends that wait, exchanges, pairs."""

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

from xtrain.schedules import Schedule, with_messages
from xtrain.schedules.action import Action

from ...tables import REGISTRY, Table
from ...values import value
from .common import made, played

# --- E78: who waits forever if a send returns only when the other rank receives

Message = tuple[str, int, int]  # F or B, the stage that computed it, the micro-batch


def waits_forever(
    schedule: Schedule, fused: bool = False, by_parity: bool = False
) -> dict[int, str]:
    """The ranks that never get to their end, with the messages at which they stand.

    A message passes when both of its ranks stand at it. Computing takes no time.

    Args:
        fused: sends and receives with no computation between them are posted together,
            and then waited for together.
        by_parity: of those, even ranks send before they receive, odd ranks after it;
            right for 1F1B, whose neighbours have the same two messages side by side.
    """
    rows = enumerate(with_messages(schedule).actions)
    orders = [
        list(posts(row, fused, rank % 2 if by_parity else None)) for rank, row in rows
    ]
    passed: set[Message] = set()
    moved = True
    while moved:
        posted = [action for posts in orders for action in posts[0]]
        sent = {message_of(action) for action in posted if is_send(action)}
        passed |= sent & {message_of(a) for a in posted if not is_send(a)}
        moved = False
        for order in orders:
            if order[0] and passed.issuperset(map(message_of, order[0])):
                order.pop(0)
                moved = True
    return {
        rank: ", ".join(map(str, order[0]))
        for rank, order in enumerate(orders)
        if order[0]
    }


def posts(
    actions: Sequence[Action], fused: bool, parity: int | None = None
) -> Iterator[list[Action]]:
    """The messages of a rank as it waits for them, and an empty list at the end."""
    for message, row in groupby(actions, lambda a: a.kind.startswith(("SEND", "RECV"))):
        if message:
            together = list(row)
            both_ways = len({action.kind[-1] for action in together}) > 1
            if parity is not None and both_ways:  # to and from one neighbour
                together.sort(key=is_send, reverse=parity == 0)
            yield from [together] if fused else ([action] for action in together)
    yield []


def is_send(action: Action) -> bool:
    return action.kind.startswith("SEND")


def message_of(action: Action) -> Message:
    """What it sends or receives: the same for both."""
    kind, stage, i, _ = action
    stage += {"RECV_F": -1, "RECV_B": 1}.get(kind, 0)
    return kind[-1], stage, i


@value
def with_waiting_sends(name: str, fused: bool = False) -> str:
    """What 4 ranks with 8 micro-batches do."""
    found = waits_forever(made(name, 4, 8), fused)
    if not found:
        return "runs"
    return "waits" if fused else f"waits at `{found[0]}`"


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
