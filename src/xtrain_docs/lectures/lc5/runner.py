"""The runner: the picture of a step, with its messages."""

from xtrain.schedules import with_messages, with_reductions

from ...figures import REGISTRY
from ...svg import cell, document, line, text
from .common import TITLES, made

WIDTH, LANE, APART, TOP, CELL = 390, 84, 68, 30, 20
"""The drawing, a rank's column, between two columns, above them, a computation."""
COLOURS = {"F": 0, "BW": 1}
Placed = dict[tuple[int, int], tuple[float, float]]


def placed(lists: list[list[str]]) -> Placed:
    """From where to where each action is drawn: a receive not before its send."""
    sends: dict[str, float] = {}
    ends, at = [0.0] * len(lists), [0] * len(lists)
    found: Placed = {}
    while any(at[rank] < len(mine) for rank, mine in enumerate(lists)):
        for rank, mine in enumerate(lists):
            while at[rank] < len(mine):
                action = mine[at[rank]]
                begin = ends[rank]
                if "RECV" in action:
                    if (send := sent_as(action)) not in sends:
                        break
                    begin = max(begin, sends[send] + 8.0)
                high = 7.0 if "_" in action else 15.0 if "REDUCE" in action else CELL
                found[rank, at[rank]] = begin, begin + high
                if "SEND" in action:
                    sends[action] = begin + high / 2
                ends[rank], at[rank] = begin + high + 1, at[rank] + 1
    return found


def sent_as(receive: str) -> str:
    """The send that a receive belongs to: 1RECV_F0 takes what 0SEND_F0 sent."""
    stage, _, kind = receive.partition("RECV_")
    return f"{int(stage) + (-1 if kind[0] == 'F' else 1)}SEND_{kind}"


@REGISTRY
def runner_executed(
    name: str = "one_f_one_b", ranks: int = 3, micro_batches: int = 3
) -> str:
    """What ranks execute, from top to bottom, with their messages."""
    order = with_messages(with_reductions(made(name, ranks, micro_batches)))
    lists = [[str(action) for action in row] for row in order.actions]
    where = placed(lists)
    places = {
        action: sum(where[rank, n]) / 2 + TOP
        for rank, mine in enumerate(lists)
        for n, action in enumerate(mine)
    }
    parts = [
        text(left(rank) + LANE / 2, 16, f"rank {rank}", "xt-label", "middle")
        for rank in range(ranks)
    ]
    for rank, mine in enumerate(lists):
        for n, action in enumerate(mine):
            parts += drawn(rank, action, where[rank, n], places)
    high = int(max(end for _, end in where.values())) + TOP + 8
    words = (
        "Each rank's actions from top to bottom: forwards and backwards, and between "
        "the columns the messages, from a send to its receive."
    )
    title = f"What {ranks} ranks execute in a step of {TITLES[name]}"
    return document(WIDTH, high, parts, title, words)


def left(rank: int) -> float:
    """Where a rank's column begins."""
    return 1 + rank * (LANE + APART)


def drawn(
    rank: int, action: str, span: tuple[float, float], places: dict[str, float]
) -> list[str]:
    """A computation as a cell; a receive as the arrow from its send."""
    x, (begin, end) = left(rank), (span[0] + TOP, span[1] + TOP)
    if "SEND" in action:
        return []
    if "RECV" in action:
        forward = "_F" in action
        tip = x if forward else x + LANE
        tail = left(rank - 1) + LANE if forward else left(rank + 1)
        back = -5 if forward else 5
        y = places[action]
        arrow = [line(tail, places[sent_as(action)], tip, y, "xt-line xt-s0")]
        arrow += [line(tip + back, y + d, tip, y, "xt-line xt-s0") for d in (-4, 3)]
        return arrow if forward else [part.replace("s0", "s1") for part in arrow]
    if "REDUCE" in action:
        return [text(x + LANE / 2, end, action, "xt-tick", "middle")]
    kind = next(k for k in ("BW", "F") if k in action)
    return cell(x, begin, LANE, CELL, COLOURS[kind], action, low=4, opacity=0.35)
