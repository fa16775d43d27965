"""Who waits forever if a send returns only when the other rank receives."""

from collections.abc import Iterator, Sequence
from itertools import groupby

from xtrain.schedules import Schedule, with_messages
from xtrain.schedules.action import Action
from xtrain.schedules.passes import receive_of


def waits_forever(
    schedule: Schedule, fused: bool = False, by_parity: bool = False
) -> dict[int, str]:
    """The ranks that never finish, with the messages at which they wait.

    A message passes when both of its ranks are at it. Computing takes no time.

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
    passed: set[Action] = set()
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


def message_of(action: Action) -> Action:
    """The same for a send and for its receive."""
    return receive_of(action) if is_send(action) else action
