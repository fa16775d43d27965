"""Who waits forever if a send returns only when the other rank receives."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from xtrain.schedules import SCHEDULES, Schedule, validate, with_messages
from xtrain.schedules.action import Action

from ...tables import REGISTRY, Table
from .figures import TITLES

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
            if parity is not None and crosses(together):
                together.sort(key=is_send, reverse=parity == 0)
            yield from [together] if fused else ([action] for action in together)
    yield []


def crosses(together: Sequence[Action]) -> bool:
    """Whether they go to the neighbour from which they come: F one way, B the other."""
    return len({action.kind[-1] for action in together}) > 1


def is_send(action: Action) -> bool:
    """Does it send, or receive?"""
    return action.kind.startswith("SEND")


def message_of(action: Action) -> Message:
    """What it sends or receives: the same for both."""
    kind, stage, i, _ = action
    if kind == "RECV_F":
        stage -= 1
    elif kind == "RECV_B":
        stage += 1
    return kind[-1], stage, i


@REGISTRY
def blocking_sends(ranks: int = 4, micro_batches: int = 8) -> Table:
    """Which schedules get to their end with sends that wait for their receive."""
    rows = []
    for name, title in TITLES.items():
        schedule = SCHEDULES[name](ranks, micro_batches)
        validate(schedule)  # it runs if sends return at once
        single = waits_forever(schedule)
        at = f"waits at `{single[0]}`" if single else "runs"
        fused = "waits" if waits_forever(schedule, fused=True) else "runs"
        rows.append([title, at, fused, "runs"])
    header = ["schedule", "one by one, rank 0", "with the receives beside them",
              "not waited for"]  # fmt: skip
    return Table(header, rows, "llll")
